"""Real SGLang servers on a CPU, in the environment that `make test-sglang` has built."""

import os
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realgraph.rehearsal.tokenizer import write_tokenizer
from realgraph.runtime.rollout.server import Argument, ServerProcess, ServerSpec
from tests.sglang_conformance.subject import CONTEXT, MAX_QUEUED, MAX_RUNNING, OTHER, SMALL
from tests.tiny import VOCABULARY

PYTHON = Path(sys.prefix) / "sglang" / "bin" / "python"  # below the environment of the tests themselves
STUBS = Path(__file__).parent / "stubs"
# CPU: rotary embeddings without vLLM's kernels; one thread a process, or threads that spin take all cores; no compiler.
ENVIRONMENT = {
    "PYTHONPATH": str(STUBS),
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
}
ARGUMENTS: dict[str, Argument] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sleep_on_idle": True,
    "context_length": CONTEXT,
    "max_total_tokens": 32768,
    "max_running_requests": MAX_RUNNING,
    "max_queued_requests": MAX_QUEUED,
    "mem_fraction_static": 0.5,
}
# of servers that runs start, which say the others themselves
OF_RUNS = {name: value for name, value in ARGUMENTS.items() if name not in ("dtype", "max_running_requests")}
START_SECONDS = 240.0  # 15 alone, and more beside other tests


def interpreter(home: Path) -> Path:
    """The real one, with what a CPU needs."""
    words = " ".join(f"{name}='{value}'" for name, value in ENVIRONMENT.items())
    file = home / "python"
    file.write_text(f'#!/bin/sh\nexec env {words} "{PYTHON}" "$@"\n')
    file.chmod(0o755)
    return file


def save_models(home: Path) -> tuple[Path, Path]:
    """The folders of SMALL and OTHER, with a tokenizer of a letter, digit or space a token, and no end."""
    for name, network in (("small", SMALL), ("other", OTHER)):
        network.save_pretrained(home / name)
        write_tokenizer(home / name, (string.ascii_letters + " " + string.digits)[:VOCABULARY], None, "0")
    return home / "small", home / "other"


def spec(model: Path, log: Path, tp: int = 1, **arguments: Argument) -> ServerSpec:
    """A server of version 0. tp: ranks, each on a core of its own."""
    assert PYTHON.exists(), f"{PYTHON} is not there: run `make test-sglang`"
    environment = dict(ENVIRONMENT)
    if tp > 1:
        cores = sorted(os.sched_getaffinity(0))
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    given = {**ARGUMENTS, "tp_size": tp, **arguments}
    return ServerSpec(str(PYTHON), str(model), 0, str(log), given, environment, start_seconds=START_SECONDS)


@contextmanager
def started(what: ServerSpec) -> Iterator[ServerProcess]:
    """The server's processes, ended at the end; not ready yet."""
    process = ServerProcess(what)
    try:
        yield process
    finally:
        process.stop()
