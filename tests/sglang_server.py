"""Starts stand-ins of SGLang servers (`tests/sglang_standin`) for tests, and asks them without a client of ours."""

import asyncio
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.server import ServerProcess
from tests.sglang_forks import forks, start_fork
from tests.sglang_standin.launch import FORKS
from tests.traces import processes_at, title_of

ROOT = Path(__file__).parent.parent
START_SECONDS = 120.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


@dataclass
class StandIn:
    """A server in a process of its own."""

    process: ForkServerProcess
    url: str
    log: Path
    fault_file: Path

    def fault(self, word: str = "") -> None:
        """From now on /generate does this: see `tests/sglang_standin/server.py`."""
        self.fault_file.write_text(word)

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.join(10)

    def ask(self, path: str, body: Any = None, seconds: float = 60.0) -> tuple[int, Any]:
        """Status and answer of a request; the answer decoded where it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with DIRECT.open(request, timeout=seconds) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text.decode()

    def requests(self) -> int:
        """Those that it has."""
        (load,) = self.ask("/v1/loads")[1]["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    def generate(self, tokens: list[int], n_new: int, seconds: float = 60.0, **more: Any) -> dict[str, Any]:
        """The answer to one request for log-probabilities; fails where it is not 200."""
        rid = more.pop("rid", None)
        sampling = {"max_new_tokens": n_new, **more}
        body = {"rid": rid, "input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
        status, answer = self.ask("/generate", body, seconds)
        assert status == 200, answer
        return dict(answer)


PREPARE = """from tests.sglang_standin.arguments import parse

def prepare_server_args(argv):
    return parse(argv)
"""
LAUNCH = """import sys
from sglang.srt import server_args
from tests.sglang_standin.launch import launch

if __name__ == "__main__":
    launch(server_args.prepare_server_args(sys.argv[1:]))
"""


def interpreter(home: Path, **environment: str) -> Path:
    """An interpreter whose environment has the stand-in under SGLang's name, as `rollout.python`. environment: of all
    that it runs, such as SGLANG_STANDIN_FAULT."""
    package = home / "package" / "sglang"
    (package / "srt").mkdir(parents=True)
    for name in ("__init__.py", "srt/__init__.py"):
        (package / name).touch()
    (package / "srt" / "server_args.py").write_text(PREPARE)
    (package / "launch_server.py").write_text(LAUNCH)
    given = {"PYTHONPATH": f"{package.parent}:{ROOT}", FORKS: forks(), **environment}
    words = " ".join(f"{name}='{value}'" for name, value in given.items())
    file = home / "python"
    file.write_text(f'#!/bin/sh\nexec env {words} "{sys.executable}" "$@"\n')
    file.chmod(0o755)
    return file


def servers_at(home: Path) -> list[int]:
    """The processes of the servers of a run in `home`, below the guardians that write their logs."""
    guardians = {str(pid) for pid in processes_at(home)}
    titles = {int(entry.name): title_of(int(entry.name)).split() for entry in Path("/proc").glob("[0-9]*")}
    return [pid for pid, words in titles.items() if words[-2:-1] == ["serve"] and words[-1] in guardians]


def wait_ready(process: ServerProcess) -> None:
    """Return when it generates. Raises ServerNotStarted."""

    async def wait() -> None:
        client = SglangClient(process.url, process.key)
        try:
            await process.wait_ready(client)
        finally:
            await client.close()

    asyncio.run(wait())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def standin(model: Path, home: Path, *arguments: str, release: str = "0.5.23", port: int = 0) -> Iterator[StandIn]:
    """A server of a model folder, ready; killed at the end. home: for its log."""
    port = port or free_port()
    home.mkdir(parents=True, exist_ok=True)
    log, fault_file = home / f"server-{port}.log", home / f"fault-{port}"
    environment = {
        "SGLANG_STANDIN_RELEASE": release,
        "SGLANG_STANDIN_FAULT": str(fault_file),
        "SGLANG_HEALTH_CHECK_TIMEOUT": "2",
    }
    process = start_fork(["--model-path", str(model), "--port", str(port), *arguments], environment, str(log))
    server = StandIn(process, f"http://127.0.0.1:{port}", log, fault_file)
    try:
        _await(server)
        yield server
    finally:
        process.kill()
        process.join(10)


def _await(server: StandIn) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.process.is_alive(), server.log.read_text()
        assert time.monotonic() < deadline, server.log.read_text()
        try:
            if server.ask("/model_info")[0] in (200, 401):  # without its key
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
