"""Agents that a program of this host starts on all others: it gets the key on its standard input."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from realgraph.runtime.hosts.starter import Invitation
from realgraph.runtime.job.rotation import last_lines
from realgraph.runtime.job.run_folder import private
from realgraph.runtime.processes.launcher import LaunchError, describe_exit

END_SECONDS = 10.0  # for it to end by itself once its agents have, and again once it has been told to
LOOK_SECONDS = 0.1  # between two looks at it


class StartedByProgram:
    """Implements AgentStarter. The program outlives the event loop of one start of the run, where the run goes on by
    itself; its standard input stays open as long as the run lasts, so that it can see the end."""

    def __init__(
        self,
        name: str,
        words: Callable[[Invitation], Sequence[str]],
        log: Path,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """words: the command line for an invitation. log: the file for what the program and the agents print. say:
        shows a line to the user. environment: the program's; by default that of this process."""
        self._name, self._words, self._log, self._say = name, words, log, say
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, invitation: Invitation) -> None:
        """See AgentStarter."""
        nodes = "the node" if invitation.n_hosts == 1 else f"the {invitation.n_hosts} nodes"
        spare = f", and on up to {invitation.n_spare} to spare" if invitation.n_spare else ""
        self._say(f"{self._name} starts an agent on {nodes} of the plan{spare}; what it prints: {self._log}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab", opener=private) as log:
            try:
                self._process = subprocess.Popen(
                    self._words(invitation),
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{self._name} can't be started: {error.strerror}") from None
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `failed` says why
            stdin.write(f"{invitation.key.strip()}\n".encode())
            stdin.flush()

    async def failed(self) -> str:
        """See AgentStarter."""
        assert self._process is not None
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_SECONDS)
        said = last_lines(self._log, 5)
        return f"{self._name} {describe_exit(status)}" + (f": {said}" if said else "")

    async def stop(self) -> None:
        """See AgentStarter."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        await _over(process)
        process.terminate()  # does nothing where it has ended
        await _over(process)
        process.kill()
        await _over(process)


async def _over(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, END_SECONDS at most."""
    last = time.monotonic() + END_SECONDS
    while process.poll() is None and time.monotonic() < last:
        await asyncio.sleep(LOOK_SECONDS)
