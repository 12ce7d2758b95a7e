"""An SGLang server of our own, in the environment that has SGLang: started, watched and ended. Knows no engine.

Its processes are a group of their own below a small guardian (launcher.py), which ends them all when this process ends,
in whatever way. Ports are held from their choice to the server's end, so that no two servers get the same.
"""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct, field

from realgraph.runtime.job.rollout import RESERVED
from realgraph.runtime.job.rotation import last_lines
from realgraph.runtime.job.run_folder import private
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import ServerNotStarted

Argument = bool | int | float | str | list[int | float | str] | dict[str, object] | None
LAUNCHER = Path(__file__).with_name("launcher.py")
SHOWN_LINES = 30  # of the log of a server that did not start, or has ended
_ASK_SECONDS = 0.5  # between two questions whether it is ready
_END_SECONDS = 20.0  # for the guardian to leave nothing; then for the kernel to end what is killed


class ServerSpec(Struct, frozen=True):
    """A server to start."""

    python: str  # the interpreter that has SGLang
    model: str  # a Hugging Face folder or Hub id
    version: int  # of its weights
    log: str  # the file that its output is appended to
    arguments: Mapping[str, Argument] = field(default_factory=dict)  # `tp_size: 2` is --tp-size 2
    environment: Mapping[str, str] = field(default_factory=dict)  # set besides our own
    host: str = "127.0.0.1"
    start_seconds: float = 900.0  # until it is ready


class _Order(Struct, frozen=True):
    """The launcher's first line."""

    parent: int
    arguments: tuple[str, ...]
    key: str
    log: str
    folder: str  # removed at the end


def command_arguments(arguments: Mapping[str, Argument]) -> Iterator[str]:
    """Server arguments as SGLang's command line has them. true is a bare flag; false and null leave it out.

    Raises ValueError for a name in RESERVED.
    """
    for name, value in arguments.items():
        bare = name.lstrip("-").replace("-", "_")
        if bare in RESERVED:
            raise ValueError(f"server argument {name!r} is set by realgraph")
        flag = "--" + bare.replace("_", "-")
        match value:
            case None | False:
                pass
            case True:
                yield flag
            case list():
                yield from (flag, *map(str, value))
            case dict():
                yield from (flag, msgspec.json.encode(value).decode())
            case _:
                yield f"{flag}={value}"


def hold_port(host: str) -> socket.socket:
    """A port that the kernel gives to nobody else as long as this socket is open, and that a server may listen on.

    The socket is bound and does not listen: another one with SO_REUSEADDR, which every server sets, may bind the port
    by its number, while a choice of the kernel's never falls on it.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
    except OSError:
        holder.close()
        raise
    return holder


def _start_guardian(spec: ServerSpec, order: socket.socket, folder: str) -> "subprocess.Popen[bytes]":
    """The launcher, which is to read its order from this socket."""
    with open(spec.log, "ab", opener=private) as log:
        return subprocess.Popen(
            [spec.python, str(LAUNCHER), "watch", str(order.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**variables(), **spec.environment, "TMPDIR": folder},
            pass_fds=(order.fileno(),),
            start_new_session=True,
        )


class ServerProcess:
    """A running server. Made once per start: one that has ended is replaced by another. Raises OSError."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.key = secrets.token_urlsafe(32)
        given = tuple(command_arguments(spec.arguments))
        with ExitStack() as resources:  # ports, and the pipe whose end is the server's end
            port, rendezvous = (resources.enter_context(hold_port(spec.host)).getsockname()[1] for _ in range(2))
            host = f"[{spec.host}]" if ":" in spec.host else spec.host
            self.url = f"http://{host}:{port}"
            named = {"model-path": spec.model, "host": spec.host, "port": port, "nccl-port": rendezvous}
            fixed = [f"--{name}={value}" for name, value in named.items()]
            folder = tempfile.mkdtemp(prefix="realgraph-sglang-")  # of the server's sockets
            resources.callback(shutil.rmtree, folder, ignore_errors=True)
            self._pipe, theirs = socket.socketpair()
            resources.enter_context(self._pipe)
            with theirs:
                self._guardian = _start_guardian(spec, theirs, folder)
            self._resources = resources.pop_all()
        arguments = (*fixed, f"--weight-version={spec.version}", *given)
        order = _Order(os.getpid(), arguments, self.key, spec.log, folder)
        try:
            self._pipe.sendall(msgspec.json.encode(order) + b"\n")
        except (BrokenPipeError, ConnectionResetError):  # it has ended already: `wait_ready` says so
            return

    @property
    def pid(self) -> int:
        """The guardian's, and the number of the process group."""
        return self._guardian.pid

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit status."""
        return self._guardian.poll()

    def last_lines(self, n_lines: int = SHOWN_LINES) -> str:
        """The end of its log, for an error message; '' where there is none."""
        return last_lines(Path(self.spec.log), n_lines)

    async def wait_ready(self, client: SglangClient) -> None:
        """Return when it answers. Raises ServerNotStarted with the end of its log where it ends before, or is late."""
        deadline = time.monotonic() + self.spec.start_seconds
        while not await client.is_ready():
            if self.status is not None:
                raise self._failed(f"ended with status {self.status} before it was ready")
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready within {self.spec.start_seconds:g} s")
            await asyncio.sleep(_ASK_SECONDS)

    def stop(self) -> None:
        """End it by force, and free its ports; nothing of it is left."""
        self._pipe.close()
        try:
            self._guardian.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._guardian.wait(_END_SECONDS)
        self._resources.close()

    def _failed(self, text: str) -> ServerNotStarted:
        lines = self.last_lines()
        shown = f"; the end of {self.spec.log}:\n{lines}" if lines else f"; it wrote nothing to {self.spec.log}"
        return ServerNotStarted(self.url, f"({self.spec.python})", text + shown)
