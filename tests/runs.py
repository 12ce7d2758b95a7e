"""Real runs for tests: a tiny model, a tiny data set, the command line in a process of its own, and ways to break it.

The process of a run is forked from a server that has torch, transformers and the planner's compiled search loaded, and
so are that run's own fork server and the guardians of its functions: those seconds are paid once for all tests.
Everything after that is what `realgraph run` does.
"""

import importlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from realgraph.graphs.errors import ConfigError
from tests.crash_points import CrashPoints
from tests.forked import PATIENCE, start_forks
from tests.namespaces import enter_namespace, hide
from tests.preloaded import CONTEXT
from tests.traces import enter_shared_memory, processes_at, title_of

REWARDS = '''
import json, os, re, signal, time
from pathlib import Path

HERE = Path(__file__).parent

def fault():
    path = HERE / "fault.json"
    return json.loads(path.read_text()) if path.exists() else {}

def score(text: str, answer: str) -> float:
    """Something between 0 and 1 for any text: a model that knows nothing has a gradient too."""
    told = fault()
    time.sleep(told.get("sleep", 0.0))
    if "raise" in told and text >= told["raise"]:
        raise KeyError(f"no score for {text!r}")
    if told.get("hang"):
        time.sleep(1000)
    return sum(map(int, text)) % 7 / 7 if text.isdigit() else 0.0

def with_prompt(text: str, answer: str, prompt: str, prompt_ids: list[int]) -> float:
    """As `score`, where the prompt has come as text and as ids."""
    if not prompt.endswith("=") or not prompt_ids or not all(type(token) is int for token in prompt_ids):
        raise TypeError(f"prompt {prompt!r}, prompt_ids {prompt_ids!r}")
    return score(text, answer)

def spoil(batch, outputs):
    """A loss term that changes nothing, until it is told to."""
    told = fault()
    if "compute_sleep" in told:
        (HERE / "computing").touch()
        time.sleep(told["compute_sleep"])
    if told.get("stuck"):
        re.match("(a|a)*$", 60 * "a" + "b")  # for ages, in C, with the interpreter's lock held
    return outputs.logprobs * (float("nan") if told.get("nan") else 0.0)
'''

BASE: dict[str, Any] = {
    "models": {"actor": {"path": "model"}},
    "data": {
        "path": "train.jsonl",
        "max_prompt_tokens": 8,
        "columns": {"prompt": "prompt", "answer": "answer"},
    },
    "batch": {"groups": 8, "max_new_tokens": 4},
    "cluster": {"nodes": 1, "devices": 2, "kind": "cpu"},
    "seed": 3,
}
GRPO = {
    "graph": "grpo",
    "params": {"group_size": 4, "lr": 3.0e-3, "minibatches": 2},
    "calls": {
        "reward": {"fn": "rewards:score"},
        "train": {"loss": {"terms": {"spoil": {"kind": "apply", "fn": "rewards:spoil"}}}},
    },
}


def make_home(folder: Path) -> Path:
    """A folder with a model, data, and a module of rewards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from realgraph.commands.arithmetic import write_data, write_model

    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, 0)
    for name, n_rows in (("train", 300), ("test", 20)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True)[:n_rows]))
    write_model(folder / "model", 0)
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = AutoConfig.from_pretrained(folder / "model", **small)
    config.layer_types = config.layer_types[:2]
    config.initializer_range = 0.2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Mappings merged in depth; later ones win."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            inside = found.get(key)
            found[key] = merged(inside if isinstance(inside, dict) else {}, value) if isinstance(value, dict) else value
    return found


def write_run(home: Path, name: str, *parts: dict[str, Any]) -> Path:
    """`<name>.yaml` of BASE and what is merged over it; the run directory is `<name>`. JSON is YAML."""
    file = home / f"{name}.yaml"
    file.write_text(json.dumps(merged(BASE, {"outputs": {"dir": str(home / name)}}, *parts)))
    return file


def set_fault(home: Path, **what: Any) -> None:
    """Set what the rewards of this home do from now on."""
    partial = home / "fault.partial"
    partial.write_text(json.dumps(what))
    partial.replace(home / "fault.json")


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Special:
    """Differences of a run from any other."""

    ignored: signal.Signals | None = None  # as under nohup
    terminal: str = ""  # the terminal that it is started in and shows itself on, instead of a file
    # Constants by `module.NAME`, below `realgraph.runtime` or from `realgraph` on: a test need not wait for minutes.
    limits: dict[str, float] = field(default_factory=dict)
    dies_at: int = 0  # the file operation in its run directory, from 1, before which its master is killed; 0: none
    namespace: str = ""  # the network namespace that it runs in
    hidden: str = ""  # a folder that it does not see: at its place there is an empty file system of its own

    def apply(self, folder: Path) -> None:
        enter_shared_memory(folder.parent)
        if self.namespace:
            enter_namespace(self.namespace)
        if self.hidden:
            hide(self.hidden)
            tempfile.tempdir = str(folder.parent)
        if self.ignored is not None:
            signal.signal(self.ignored, signal.SIG_IGN)
        for name, value in self.limits.items():
            module, _, constant = name.rpartition(".")
            path = module if module.startswith("realgraph.") else f"realgraph.runtime.{module}"
            found = importlib.import_module(path)
            assert hasattr(found, constant)
            setattr(found, constant, value)
        if self.dies_at:
            CrashPoints(self.dies_at, folder).install()


PLAIN = Special()


def _enter(argv: list[str], folder: Path, output: str, special: Special) -> None:
    """Do what the console script does, in the process of a run."""
    from realgraph.__main__ import main

    os.setsid()
    out = os.open(special.terminal or output, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
    os.chdir(folder.parent)
    sys.argv = ["realgraph", *argv]
    special.apply(folder)
    start_forks()
    main()


_STARTED: list[tuple[ForkServerProcess, Path]] = []  # each with its home


@dataclass
class Running:
    """A run in a process of its own."""

    process: ForkServerProcess
    home: Path
    output_file: Path
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def output(self) -> str:
        return self.output_file.read_text() if self.output_file.exists() else ""

    def records(self, kind: str = "step") -> list[dict[str, Any]]:
        return records(self.folder, kind)

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until something is so; fails where the run ends before."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert self.process.is_alive(), f"the run ended before {what}:\n{self.output()}"
            if time.monotonic() > deadline:
                self._give_up(f"{what} has not come in {PATIENCE:.0f} s")
            time.sleep(0.01)

    def until_step(self, step: int) -> None:
        """Wait until `step` whole steps are recorded."""
        self.until(lambda: any(record["step"] + 1 >= step for record in self.records()), f"step {step}")

    def workers(self) -> dict[int, int]:
        """worker -> pid."""
        found = {}
        for pid in processes_at(self.home):
            try:
                log = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
                worker = title_of(pid).startswith("realgraph worker")
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            if log.startswith("worker-") and worker:
                found[int(log[7:-4])] = pid
        return found

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code."""
        self.process.join(seconds)
        if self.process.is_alive():
            self._give_up(f"the run has not ended in {seconds:.0f} s")
        assert self.process.exitcode is not None
        return self.process.exitcode

    def _give_up(self, why: str) -> NoReturn:
        """Fail with all that the run has said. It is killed: it would slow the other tests and be found by them."""
        said = f"{self.output()}\n{logs(self.folder)}"
        self.process.kill()
        self.process.join(10)
        pytest.fail(f"{why}:\n{said}")


def start(home: Path, *argv: str, name: str = "run", special: Special = PLAIN) -> Running:
    """`realgraph ARGV...` in `home`. name: of the run directory, for its records."""
    output = home / f"{name}-{time.monotonic_ns()}.out"
    process = CONTEXT.Process(target=_enter, args=(list(argv), home / name, str(output), special))
    process.start()
    _STARTED.append((process, home))
    return Running(process, home, output, home / name)


def finish(home: Path, *argv: str, name: str = "run", code: int = 0, special: Special = PLAIN) -> Running:
    """Run a command to its end, which must be with exit code `code`."""
    running = start(home, *argv, name=name, special=special)
    found = running.wait()
    assert found == code, f"exit code {found}, not {code}:\n{running.output()}\n{logs(running.folder)}"
    return running


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a module's function, called in a process of its own, whose workers start as fast as a run's.

    Raises the ConfigError that it raises there.
    """
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    _STARTED.append((process, Path()))
    theirs.close()
    assert ours.poll(PATIENCE), f"{function.__name__} has not answered in {PATIENCE:.0f} s"
    well, found = ours.recv()
    process.join(PATIENCE)
    if not well:
        raise ConfigError(found)
    return found


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    start_forks()
    try:
        pipe.send((True, function(*arguments)))
    except ConfigError as error:
        pipe.send((False, error.problems))


def stop(home: Path) -> None:
    """Kill the runs of this home that a test has left alive, as one that fails does: each would slow all others."""
    for process, its_home in _STARTED:
        if its_home == home and process.is_alive():
            process.kill()
            process.join(10)


# --- what a run leaves ------------------------------------------------------------------------------------------------


def records(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in found if record["type"] == kind]


def logs(folder: Path) -> str:
    """The workers' logs."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").glob("*.*")))


# times, how many sequences decode when a group is reported, and bytes that an allocator keeps
OF_THE_CLOCK = (
    "seconds",
    "tokens_per_second",
    "/running",
    "/waiting",
    "/free_cache_tokens",
    "/peak_bytes",
    "/planned_bytes",
    "/prefetched_bytes",
)


class Summed(float):
    """A metric: shares of groups and workers add up as they come, so the last bits of equal ones may differ."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented  # what is compared with is a tolerance of its own
        return math.isclose(self, other, rel_tol=1e-12, abs_tol=1e-15)

    __hash__ = float.__hash__


def numbers(folder: Path) -> dict[int, dict[str, float]]:
    """step -> every metric that the clock does not change; of a step that was trained twice, the last record."""
    return {
        record["step"]: {
            name: Summed(value) for name, value in record["metrics"].items() if not name.endswith(OF_THE_CLOCK)
        }
        for record in records(folder)
    }


def copy_home(home: Path, target: Path) -> Path:
    """A home of one's own, to be broken."""
    shutil.copytree(home, target)
    return target


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model and data, made once. To be read only: `copy_home` for a test that breaks something."""
    yield make_home(tmp_path_factory.mktemp("home"))
    for process, _ in _STARTED:  # of tests that failed
        if process.is_alive():
            process.kill()


def least_updates(n_steps: int, staleness: int) -> int:
    """Updates without which a step would train on older samples than it may: any one serves `staleness` + 1 steps."""
    return (n_steps - 1) // (staleness + 1)


def assert_gaps(steps: Iterable[dict[str, float]], n_steps: int, staleness: int) -> None:
    """Engine and trainer were compared at the start and after each update, and agreed. steps: their metrics."""
    kinds = ("logprob_gap", "update_gap")
    gaps = [value for metrics in steps for key, value in metrics.items() if key.endswith(kinds)]
    assert len(gaps) > least_updates(n_steps, staleness) and 0 < max(gaps) < 1e-3
