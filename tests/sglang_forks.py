"""Stand-ins of SGLang servers as forks of processes that have torch and transformers loaded already."""

import argparse
import json
import os
import signal
import socket
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from tests.preloaded import CONTEXT

START_SECONDS = 120.0  # to import what the fork server has not


def start_fork(arguments: list[str], environment: Mapping[str, str], log: str) -> ForkServerProcess:
    """A server in a process of its own, which writes its output to a file."""
    process = CONTEXT.Process(target=_serve, args=(arguments, dict(environment), log), daemon=True)
    process.start()
    return process


def _serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    from tests.sglang_standin.arguments import parse

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _be_server(parse(arguments), environment, (out, out))


def _be_server(arguments: argparse.Namespace, environment: Mapping[str, str], outputs: tuple[int, int]) -> None:
    from tests.sglang_standin.server import start

    for standard, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, standard)
    os.environ.update(environment)
    start(arguments)


@cache
def forks() -> str:
    """The name of an abstract socket where `tests.sglang_standin.launch` asks for servers, as long as this process
    lives."""
    ours, theirs = CONTEXT.Pipe()
    CONTEXT.Process(target=_fork_servers, args=(theirs,), daemon=True).start()
    theirs.close()
    assert ours.poll(START_SECONDS), "the process that forks servers does not start"
    name: str = ours.recv()
    _held.append(ours)
    return name


_held: list[Connection] = []  # while this is open there is somebody to fork servers for


def _fork_servers(owner: Connection) -> None:
    import tests.sglang_standin.server  # noqa: F401  # before any fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the kernel reaps them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen()
        owner.send(listener.getsockname()[1:].decode())
        while owner not in wait([owner, listener]):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                owner.close()
                _forked(connection)
            connection.close()


def _forked(connection: socket.socket) -> None:
    """The life of a server whose launcher is on the other end."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, (out, err), _, _ = socket.recv_fds(connection, 1, 2)
        order = json.loads(connection.makefile().readline())
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        _be_server(argparse.Namespace(**order["arguments"]), order["environment"], (out, err))
    except BaseException:
        traceback.print_exc()  # to the server's log
    finally:
        os._exit(1)


def _end_with(connection: socket.socket) -> None:
    connection.recv(1)
    os._exit(1)
