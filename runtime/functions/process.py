"""One subprocess that runs user functions, with its guardian, as its owner sees them. Knows nothing of work.

It gets a few variables of the environment, and those that its functions name; nothing else, since keys of services lie
there. Two sockets lead to it: calls and answers to the process itself, and one to its guardian.
"""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from realgraph.runtime.processes.environment import variables

CLOSE_SECONDS = 10.0
# What programs need to start, to find their files and to behave as they do in a terminal here. No proxies: their
# addresses hold passwords.
PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|XDG_\w+"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|LD_LIBRARY_PATH|LD_PRELOAD|DYLD_LIBRARY_PATH"
    r"|OMP_\w+|MKL_\w+|OPENBLAS_\w+|NUMEXPR_\w+|VECLIB_\w+|TOKENIZERS_PARALLELISM"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|CUDA_PATH"
    r"|HF_HOME|HF_HUB_CACHE|HF_DATASETS_CACHE|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
)


class Death(NamedTuple):
    """The end of a subprocess that nobody here has asked for.

    text: `ended its process ...`. from_outside: by SIGKILL, for which functions have no use: a person sent it, the
    kernel where the machine's memory is full, or a cluster that ends all processes of a job.
    """

    text: str
    from_outside: bool = False


class Guardian(Protocol):
    """The guardian's process, as its owner sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def open_guardian(options: str, fds: tuple[int, int], user_dir: str, env: Mapping[str, str]) -> Guardian:
    """A guardian with these options, in `user_dir`, with these files and this environment alone. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "realgraph.runtime.functions.guardian", options],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        cwd=user_dir,
        env=env,
        start_new_session=True,
    )


@dataclass(frozen=True)
class Bounds:
    """Bounds on what each subprocess may take."""

    memory_bytes: int  # of its data
    processes: int  # it and all that it starts


class FunctionProcess:
    """A started subprocess. `end` it in every case; all that its functions have started ends with it."""

    def __init__(self, user_dir: str, env: Collection[str], bounds: Bounds) -> None:
        """env: names of further variables that it gets. Raises OSError."""
        self.calls, calls = socket.socketpair()
        self._control, control = socket.socketpair()
        options = json.dumps([control.fileno(), calls.fileno(), user_dir, bounds.memory_bytes, bounds.processes])
        try:
            fds = (control.fileno(), calls.fileno())
            self._guardian = open_guardian(options, fds, user_dir, environment(variables(), env))
        except OSError:
            self.calls.close()
            self._control.close()
            raise
        finally:
            calls.close()
            control.close()
        self.calls.setblocking(False)
        self._bounds = bounds

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._guardian.pid

    def end(self) -> None:
        """Kill it and everything its functions have started, and reap it."""
        self.calls.close()
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)
        self._finish()

    def died(self) -> Death:
        """End it after its calls have ended without being asked to, and say how that came."""
        self.calls.close()
        with contextlib.suppress(OSError):  # it has ended
            self._control.sendall(b"?")
        what, _, number = self._finish().partition(" ")
        match what:
            case "exit" if int(number) >= 0:
                return Death(f"ended its process with exit code {number}")
            case "exit":
                return Death(f"had its process killed by {_signal_name(-int(number))}", -int(number) == signal.SIGKILL)
            case "limit":
                limit = self._bounds.processes
                hint = "runtime.function_max_processes sets the limit"
                text = f"had {number} processes running, more than the {limit} allowed, and all were killed"
                return Death(f"{text}; {hint}")
            case "closed":
                return Death("closed the socket that carries its answers, and was killed")
            case _:
                status = self._guardian.returncode or 0
                how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
                return Death(f"lost the guardian of its process, which {how}", -status == signal.SIGKILL)

    def _finish(self) -> str:
        """The guardian's report, once it has ended."""
        report = self._report(time.monotonic() + CLOSE_SECONDS)
        self._control.close()
        try:
            self._guardian.wait(CLOSE_SECONDS if report else 1.0)
        except subprocess.TimeoutExpired:  # stopped, or stuck in the kernel: the kernel kills the process below it
            self._guardian.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guardian.wait(1.0)
        return report

    def _report(self, deadline: float) -> str:
        report = b""
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._control.settimeout(left)
                piece = self._control.recv(256)
                if not piece:
                    break
                report += piece
        except OSError:  # too late, or cut off
            pass
        return report.decode()


def environment(ours: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The part of our environment that a subprocess gets; one thread for numeric libraries, as many processes run at
    once."""
    kept = {name: value for name, value in ours.items() if PASSED.fullmatch(name) or name in named}
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **kept}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
