"""Real hosts that start a run: two network namespaces with eight workers each, from cold processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.namespaces import Network
from tests.runs import GRPO, make_home, write_run

PATIENCE_SECONDS = 240.0
PORT = 7000


@contextmanager
def command(space: str, words: Sequence[str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`realgraph WORDS...` in a network namespace, killed at the end where it still runs."""
    inside = ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-m", "realgraph", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(inside, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(process: "subprocess.Popen[bytes]", output: Path, text: str) -> float:
    """The time when a command has said something."""
    last = time.monotonic() + PATIENCE_SECONDS
    while text not in output.read_text():
        assert process.poll() is None and time.monotonic() < last, output.read_text()
        time.sleep(0.02)
    return time.time()


def start(net: Network, base: Path, per_host: int) -> dict[str, Any]:
    """A run of GRPO on two hosts, for two steps: seconds of its parts."""
    home = make_home(base / "home")
    listen = f"{net.addresses[0]}:{PORT}"
    layout = {"cluster": {"nodes": 2, "devices": per_host}, "batch": {"groups": 2 * per_host}, "steps": 2}
    file = write_run(home, "run", GRPO, layout, {"launch": {"kind": "hosts", "listen": listen}})
    outputs = [home / f"{name}.out" for name in ("master", "a", "b")]
    agent = ("worker", "--connect", listen, "--key", str(home / "run/join.key"), "--name")
    with command(net.spaces[0], ("run", str(file)), outputs[0]) as master:
        until(master, outputs[0], "type on each of them")
        with (
            command(net.spaces[0], (*agent, "a"), outputs[1]) as first,
            command(net.spaces[1], (*agent, "b"), outputs[2]) as second,
        ):
            joined = until(master, outputs[0], "has joined: 2 of 2")
            code = master.wait(PATIENCE_SECONDS)
            ended = time.time()
            codes = [one.wait(PATIENCE_SECONDS) for one in (first, second)]
    assert [code, *codes] == [0, 0, 0], outputs[0].read_text()
    records = [json.loads(line) for line in (home / "run/metrics.jsonl").read_text().splitlines()]
    begun = next(record for record in records if record["type"] == "start")
    last_step = max(record["time"] for record in records if record["type"] == "step")
    return {
        "workers": 2 * per_host,
        "ready_seconds_after_the_last_agent": begun["time"] - joined,
        "of_which_until_processes_ran": begun["facts"]["fork_seconds"],
        "end_seconds_with_a_checkpoint": ended - last_step,
    }
