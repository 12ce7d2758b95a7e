"""The runs that `benchmarks.chaos` breaks: tiny models, every way of training, evaluations and checkpoints in all.

A reward that is late on some rows lets asynchronous runs meet ages up to their bound and beyond. A function over each
step's batch notes which data rows were trained, from which the groups follow.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realgraph.runtime.job.cursor import row_of
from tests.runs import BASE, make_home, merged

N_TRAIN, N_TEST = 400, 6
GROUPS, SAMPLES = 4, 4  # groups of a step, samples of a group
STEPS = 10
STALE_STEPS = 14
ENGINES, REPLACED_STEPS, SLOW_SECONDS = 2, 40, 0.5  # of runs whose engines are replaced: slow, for processes to start
LATE_GROUPS = (9, 26)  # their whole submission waits for them
LOST_SECONDS = 4.0  # silence until a worker is given up; more than a loaded machine makes one wait
EVERY = {"checkpoint": 2, "eval": 3}  # steps

FUNCTIONS = '''
import asyncio, json, time
from pathlib import Path

HERE = Path(__file__).parent

def batches() -> int:
    return len((HERE / "trained.jsonl").read_text().splitlines())

async def score(
    text: str, answer: str, row: str, late_rows: list[str] = (), late_batches: int = 0, seconds: float = 0.0
) -> float:
    """Something between 0 and 1 for any text, after so many seconds; on some rows only so many batches later, or at the
    end of patience."""
    await asyncio.sleep(seconds)
    if row in late_rows:
        began, first = time.monotonic(), batches()
        while batches() < first + late_batches and time.monotonic() < began + 3:
            await asyncio.sleep(0.02)
    return sum(map(int, text)) % 7 / 7 if text.isdigit() else 0.0

def note(row: list[str], reward: list[float]) -> list[float]:
    """One line a step: the rows of its batch."""
    with (HERE / "trained.jsonl").open("a") as file:
        file.write(json.dumps([time.time(), row]) + "\\\\n")
    return reward
'''.replace("\\\\n", "\\n")


@dataclass(frozen=True)
class Setting:
    """A kind of run. exact: its numbers and weights are those of any other such run. cold: by the real command line in
    a new interpreter, which takes longer to start than those forked from a process with everything loaded."""

    name: str
    parts: dict[str, Any] = field(hash=False)
    exact: bool = True
    cold: bool = False
    staleness: int = 0
    overdue: str = "mask"
    served: bool = False  # generates on a stand-in of an SGLang server

    def run(self) -> dict[str, Any]:
        """The keys that are laid over the base run file."""
        data = {"columns": {"prompt": "prompt", "answer": "answer", "row": "row"}}
        common: dict[str, Any] = {
            "steps": STEPS,
            "batch": {"groups": GROUPS},
            "data": data,
            "eval": {"every": EVERY["eval"], "data": {**merged(BASE["data"], data), "path": "test.jsonl"}},
            "checkpoint": {"every": EVERY["checkpoint"], "keep": 2},
            "runtime": {
                "heartbeat_seconds": 0.2,
                "lost_after_seconds": LOST_SECONDS,
                "min_deadline_seconds": 60.0 if self.served else 30.0,  # a server may start anew meanwhile
                "start_seconds": 60.0 if self.cold or self.served else 20.0,
            },
            "calls": {
                "reward": {"fn": "chaos_functions:score", "reads": ["text", "answer", "row"], "timeout_seconds": 6.0},
                "noted": {
                    "kind": "function",
                    "fn": "chaos_functions:note",
                    "over": "batch",
                    "reads": ["row", "reward"],
                    "writes": {"noted": "sample float32"},
                },
            },
            "inputs": {"row": "group text"},
        }
        late = {"staleness": self.staleness, "overdue": self.overdue} if self.staleness else {}
        return merged(common, self.parts, late)


GRPO: dict[str, Any] = {"graph": "grpo", "params": {"group_size": SAMPLES, "lr": 3.0e-3, "minibatches": 2}}
PPO: dict[str, Any] = {
    "graph": "ppo",
    "params": {"actor_lr": 3.0e-3, "critic_lr": 3.0e-3, "minibatches": 2, "group_size": SAMPLES},
    "calls": {"advantage": {"steps": {"kl_penalty": {"coef": {"init": 0.1, "target": 0.02, "horizon": 100}}}}},
}
DISJOINT = {"allocation": {"rollout": {"first": 0, "devices": 1}, "train": {"first": 1, "devices": 1}}}
ONE = {"cluster": {"devices": 1}}


def late(staleness: int) -> dict[str, Any]:
    """The rewards of some groups take until their samples are older than the bound."""
    rows = [str(row_of(group, N_TRAIN, BASE["seed"], shuffle=True)) for group in LATE_GROUPS]
    args = {"late_rows": rows, "late_batches": staleness + 2}
    return {"calls": {"reward": {"args": args}}, "runtime": {"function_processes": 2}, "steps": STALE_STEPS}


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("one worker", merged(GRPO, ONE)),
        Setting("two workers", GRPO),
        Setting("fsdp", merged(GRPO, {"allocation": {"train": {"sharding": "fsdp", "devices": 2}}})),
        Setting("ppo", PPO),
        Setting("disjoint", merged(GRPO, DISJOINT)),
        Setting("command line", merged(GRPO, ONE), cold=True),
        Setting("staleness 2, drop", merged(GRPO, DISJOINT, late(2)), exact=False, staleness=2, overdue="drop"),
        Setting("staleness 4, mask", merged(GRPO, DISJOINT, late(4)), exact=False, staleness=4, overdue="mask"),
    )
}


def apart(staleness: int, overdue: str, interrupt: str, *, served: bool = False, waits: bool = False) -> Setting:
    """An audited run that generates on one worker and trains on the other. waits: on late rewards."""
    name = f"{'served, ' * served}{staleness} {overdue}, {interrupt}"
    rollout = {"interrupt": interrupt, "engine": "sglang" if served else "embedded"}
    uses = {"rollout": rollout, "outputs": {"audit": True}, "steps": STEPS}
    parts = merged(GRPO, DISJOINT, uses, late(staleness) if waits else {})
    return Setting(name, parts, exact=False, staleness=staleness, overdue=overdue, served=served)


ASYNCHRONOUS = {
    setting.name: setting
    for setting in (
        apart(1, "mask", "recompute"),
        apart(2, "drop", "keep_kv", waits=True),
        apart(3, "wait", "wait"),
        apart(4, "mask", "recompute"),
        apart(2, "mask", "recompute", served=True),
        apart(4, "drop", "recompute", served=True),
    )
}


def replaced(staleness: int, overdue: str, interrupt: str) -> Setting:
    """An audited run with two engines, in whose places new processes come, and a trainer beside them."""
    parts = {
        "cluster": {"devices": ENGINES + 1},
        "allocation": {
            "rollout": {"first": 0, "devices": ENGINES, "dp": ENGINES},
            "train": {"first": ENGINES, "devices": 1},
        },
        "rollout": {"interrupt": interrupt, "replacements": 3},
        "outputs": {"audit": True},
        "runtime": {"verify_weights": 1},
        "calls": {"reward": {"args": {"seconds": SLOW_SECONDS}}},
        "steps": REPLACED_STEPS,
    }
    name = f"replaced, {staleness} {overdue}, {interrupt}"
    return Setting(name, merged(GRPO, parts), exact=False, staleness=staleness, overdue=overdue)


REPLACED = {
    setting.name: setting
    for setting in (replaced(1, "mask", "recompute"), replaced(2, "drop", "keep_kv"), replaced(2, "wait", "wait"))
}


def chaos_home(folder: Path) -> Path:
    """Model, data with numbered rows, and functions; to be copied for each run."""
    make_home(folder)
    for name, n_rows in (("train", N_TRAIN), ("test", N_TEST)):
        file = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        many = [rows[i % len(rows)] | {"row": str(i) if name == "train" else "-"} for i in range(n_rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in many))
    (folder / "trained.jsonl").touch()
    (folder / "chaos_functions.py").write_text(FUNCTIONS)
    return folder
