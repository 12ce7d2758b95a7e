"""`realgraph profile --sglang` times the decode steps of a real server."""

import subprocess
import time
from pathlib import Path

from realgraph.planner.inputs.cluster import ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.devices import device_kind
from realgraph.profile.sglang import SIZES, SGLangServer, holds, open_server, sglang_costs
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.rollout.server import command_arguments
from tests.sglang.servers import ARGUMENTS, ENVIRONMENT, PYTHON, START_SECONDS
from tests.sglang_server import free_port

NODE = resolve(ClusterSpec(kind="cpu", devices=1), Probe(cores=2, host_memory_bytes=8_000_000_000))


def opened(process: "subprocess.Popen[bytes]", url: str, log: Path) -> SGLangServer:
    """The server, once it answers."""
    deadline = time.monotonic() + START_SECONDS
    while "fired up" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    return open_server(url)


def test_decode_steps_of_a_real_server_are_measured(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Those sizes that fit it, whose steps the fitted costs give; it lives on."""
    port, log = free_port(), tmp_path / "log"
    arguments = {name: value for name, value in ARGUMENTS.items() if name != "max_queued_requests"}
    given = [*command_arguments(arguments), f"--model-path={folders[0]}"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "sglang.launch_server", *given, "--host=127.0.0.1", f"--port={port}"],
            env={**variables(), **ENVIRONMENT},
            stdout=out,
            stderr=out,
        )
    try:
        server = opened(process, f"http://127.0.0.1:{port}", log)
        fitting = [size for size in SIZES if holds(server, *size)]
        assert fitting and len(fitting) < len(SIZES)
        start = device_kind("cpu").costs
        costs, stage = sglang_costs(start, server, NODE)
        assert stage.count == len(fitting) and costs != start and costs.gemm == start.gemm
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(60)
