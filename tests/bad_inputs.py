"""Valid inputs of every command, damage to one of them, and what the answer must be: no traceback, no hang, a place.

A place is a folder with a model, data, run files, a graph, a plan, a table of costs, lengths and a planning problem,
and where `runs` is asked for also a finished run. `draw` picks one file and damages it; `verdict` judges the outcome.
"""

import csv
import gzip
import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from msgspec import Struct
from pyarrow import parquet

from tests.mutations import Damage, damaged_bytes, damaged_json, damaged_rows, damaged_words, damaged_yaml

ROOT = Path(__file__).parent.parent
CODES = (0, 2, 3, 4, 5)  # of docs/running.md and docs/planning.md, less those of a full disk and of Ctrl-C
SEARCH = ("--time-limit", "1", "--brief")
RUN = """\
graph: grpo
models: {actor: {path: model}}
data: {path: train.jsonl, max_prompt_tokens: 8, columns: {prompt: prompt, answer: answer}}
eval: {every: 2, data: {path: test.jsonl, columns: {prompt: prompt, answer: answer}}, limit: 10}
params: {group_size: 4, lr: 3.0e-3, minibatches: 2}
calls:
  reward: {fn: "rewards:score"}
batch: {groups: 8, max_new_tokens: 4}
cluster: {nodes: 1, devices: 2, kind: cpu}
checkpoint: {every: 1}
outputs: {dir: out}
steps: 2
seed: 3
"""
PPO = """\
graph: ppo
name: ours
models: {actor: {path: model}, critic: {path: model}, ref: {path: model}}
data: {path: "*.jsonl", columns: {prompt: prompt, answer: answer}}
params: {temperature: 0.7}
calls: {reward: {fn: exact_match}}
batch: {groups: 16, max_new_tokens: 8}
cluster: {nodes: 2, devices: 4, kind: H100-SXM}
allocation: {rollout: {tp: 1}}
constraints: {share: [[rollout, train_actor]]}
steps: 10
"""


class Case(Struct, frozen=True):
    """A command in a place, of which one input is damaged. file: relative to the place; '' where it is the command."""

    kind: str
    words: tuple[str, ...]
    file: str = ""
    content: bytes = b""
    what: str = ""


class Source(Struct, frozen=True):
    """A file that is damaged, how, and the commands that read it."""

    kind: str
    file: str
    damage: Damage
    commands: tuple[tuple[str, ...], ...]


_PLANS = (("plan", "run.yaml", *SEARCH), ("plan", "run.yaml", "--json", *SEARCH))
_CHECKS = (("check", "run.yaml"), ("check", "run.yaml", "--json"), ("check", "run.yaml", "--resolved"))
_DRY = ("run", "run.yaml", "--dry-run")
QUICK = (
    Source("run file", "run.yaml", damaged_yaml, (*_CHECKS, *_CHECKS, *_PLANS, ("graph", "run.yaml"))),
    Source("run file", "run.yaml", damaged_bytes, (("check", "run.yaml"),)),
    Source("run file", "ppo.yaml", damaged_yaml, (("check", "ppo.yaml"), ("plan", "ppo.yaml", *SEARCH))),
    Source("graph file", "mine.yaml", damaged_yaml, (("check", "mine.yaml"), ("graph", "mine.yaml"))),
    Source("graph file", "mine.yaml", damaged_yaml, (("check", "run.yaml", "graph=mine.yaml"),)),
    Source("data", "train.jsonl", damaged_rows, (("check", "run.yaml"), _PLANS[0])),
    Source(
        "plan",
        "plan.json",
        damaged_json,
        (("plan", "run.yaml", "--plan", "plan.json", *SEARCH), ("plan", "diff", "same.json", "plan.json")),
    ),
    Source("costs", "costs.json", damaged_json, (("plan", "run.yaml", "--costs", "costs.json", *SEARCH),)),
    Source("lengths", "lengths.json", damaged_json, (("plan", "run.yaml", "--lengths", "lengths.json", *SEARCH),)),
    Source("problem", "problem.json", damaged_json, (("plan", "--problem", "problem.json", "--time-limit", "1"),)),
    Source("model", "model/config.json", damaged_json, (("check", "run.yaml"), _PLANS[0])),
)
_PARQUET, _GZIP, _CSV = (
    ("run.yaml", f"data.path={name}", "eval=null") for name in ("rows.parquet", "rows.jsonl.gz", "rows.csv")
)
HEAVY = (
    Source("run file", "run.yaml", damaged_yaml, (_DRY,)),
    Source("data", "train.jsonl", damaged_rows, (_DRY, ("run", "run.yaml", "steps=1", "outputs.dir=fresh"))),
    Source("plan", "plan.json", damaged_json, ((*_DRY, "--plan", "plan.json"),)),
    Source("data", "rows.parquet", damaged_bytes, (("check", *_PARQUET), ("run", *_PARQUET, "--dry-run"))),
    Source("data", "rows.jsonl.gz", damaged_bytes, (("check", *_GZIP), ("run", *_GZIP, "--dry-run"))),
    Source("data", "rows.csv", damaged_bytes, (("check", *_CSV), ("run", *_CSV, "--dry-run"))),
    Source("model", "model/config.json", damaged_json, (_DRY, ("generate", "model", "1+1="))),
    Source("model", "model/tokenizer.json", damaged_json, (("generate", "model", "1+1="),)),
    Source("model", "model/model.safetensors", damaged_bytes, (("generate", "model", "1+1="),)),
)
_RESUME = (("run", "--resume", "out"), ("run", "--resume", "out", "steps=3"))
_MEASURED = ("plan", "run.yaml", "--run", "out", *SEARCH)
_LOADS = (*_RESUME, ("eval", "run.yaml", "--checkpoint", "out"), ("generate", "out", "1+1="))
_NEWEST = "out/checkpoints/step-000002"
RUNS = (
    Source("run directory", "out/config.yaml", damaged_yaml, _RESUME),
    Source("run directory", "out/job.json", damaged_json, _RESUME),
    Source("run directory", "out/plan.json", damaged_json, (_MEASURED,)),
    Source("run directory", "out/metrics.jsonl", damaged_bytes, (_MEASURED, _RESUME[1])),
    Source(
        "run directory",
        "out/costs.json",
        damaged_json,
        (("plan", "run.yaml", "--costs", "out", *SEARCH), _MEASURED),
    ),
    Source("checkpoint", f"{_NEWEST}/state.json", damaged_json, _RESUME),
    Source("checkpoint", f"{_NEWEST}/actor/config.json", damaged_json, _LOADS),
    Source(
        "checkpoint",
        f"{_NEWEST}/actor/model.safetensors",
        damaged_bytes,
        _LOADS,
    ),
)
COMMANDS = (
    ("check", "run.yaml", "params.lr=1e-5", "--json"),
    ("plan", "run.yaml", "staleness=1", "--devices", "2..4", "--target", "3", *SEARCH),
    ("plan", "run.yaml", "--explain", "train", "--seed", "1", *SEARCH),
    ("plan", "run.yaml", "--price", "2.5", "--out", "p.json", "--html", "p.html", *SEARCH),
    ("plan", "diff", "plan.json", "same.json", "--json"),
    ("plan", "--problem", "problem.json", "--json", "--time-limit", "1"),
    ("run", "run.yaml", "calls.train.lr=1e-5", "--plan", "plan.json", "--dry-run"),
    ("run", "--resume", "nowhere", "steps=3"),
    ("eval", "run.yaml", "eval.limit=5", "--checkpoint", "nowhere"),
    ("generate", "nowhere", "1+1=", "--temperature", "0.5", "--max-new-tokens", "3", "--n", "2", "--seed", "1"),
    ("graph", "mine.yaml", "--svg", "g.svg", "--mermaid", "g.mmd"),
    ("init", "--graph", "ppo", "--out", "new.yaml"),
    ("profile", "nowhere.yaml", "--devices", "2", "--out", "c.json", "--quick"),
    ("profile", "--devices", "9999", "--sglang", "http://127.0.0.1:1"),
    ("schema", "--out-dir", "nowhere"),
    ("quickstart", "--algorithm", "nothing", "--dir", "q", "--steps", "1"),
)
# What the words of a damaged command line must not turn into: minutes of real work.
_LONG = ("run", "quickstart", "profile")


def make_place(folder: Path) -> Path:
    """Everything but a finished run; model, rewards and data are there already (`tests.runs.make_home`)."""
    (folder / "run.yaml").write_text(RUN)
    (folder / "ppo.yaml").write_text(PPO)
    shutil.copy(ROOT / "graphs" / "library" / "grpo.yaml", folder / "mine.yaml")
    shutil.copy(ROOT / "docs" / "planning_problem.json", folder / "problem.json")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress((folder / "train.jsonl").read_bytes()))
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "lengths.json").write_text(json.dumps([3, 4, 1, 2, 4, 4]))
    (folder / "costs.json").write_text(json.dumps(COSTS))
    return folder


COSTS = {
    "kind": "cpu",
    "name": "here",
    "date": "2026-01-01T00:00:00+00:00",
    "phases": {
        "train": {"factor": 1.5, "constant_seconds": 0.01, "error": 0.1, "count": 3},
        "generate": {"factor": 0.5},
    },
    "lengths": [1, 2, 4],
    "format": 2,
}


def draw(rng: random.Random, place: Path, sources: Sequence[Source], with_commands: bool = True) -> Case:
    """A case by chance: of five one is a damaged command line."""
    if with_commands and rng.random() < 0.2:
        while True:
            words, what = damaged_words(rng, rng.choice(COMMANDS))
            if not (words and words[0] in _LONG and _works(words)):
                return Case("command line", words, what=what)
    source = rng.choice(sources)
    content, what = source.damage(rng, (place / source.file).read_bytes())
    return Case(source.kind, rng.choice(source.commands), source.file, content, what)


def _works(words: Sequence[str]) -> bool:
    """True where a command of much work may be a valid one in spite of its damage."""
    if words[0] == "run":
        return "--dry-run" not in words and "nowhere" not in words
    if words[0] == "quickstart":
        return "nothing" not in words
    return "nowhere.yaml" not in words and not ("9999" in words and "--devices" in words)


# --- judging ----------------------------------------------------------------------------------------------------------

PLACE = re.compile(r"(?m)^(?:[^\n]*: (?:\$|-|\[?[A-Z]|realgraph)|error: |no plan)")
BARE = re.compile(r"\b(?:Assertion|Key|Type|Attribute|Index|Value|ZeroDivision|Recursion|Unicode\w+|Overflow)Error\b")
NONSENSE = re.compile(r"(?<![\w./'\"-])(?:nan|inf|-inf)(?![\w'\"-])")
SECTIONS = {  # what may be named in a file's place: where its value stands in the run file, or what then lacks one
    "run file": "graphs/library/",
    "run directory": "graphs/library/",
    "data": "$.data",
    "graph file": ".yaml:",
    "checkpoint": "checkpoint",
    "model": "$.models",
}
QUIET = ("\n", "\t")


def verdict(case: Case, code: int | None, output: str) -> str:
    """The fault of the answer; '' where it has none. code: None where it did not end in time."""
    if code is None:
        return "a hang"
    if "Traceback" in output or BARE.search(output):
        return "a traceback"
    if code not in CODES:
        return f"exit code {code}"
    if any((ord(c) < 32 and c not in QUIET) or 127 <= ord(c) < 160 for c in output):
        return "a control character"
    if code == 0:
        return "numbers that are none" if NONSENSE.search(output) else ""
    if not PLACE.search(output):
        return "no place"
    named = Path(case.file)
    stands_for = SECTIONS.get(case.kind, named.name)  # the place in the run file that names it
    if case.file and not any(part in output for part in (named.name, f"{named.parent}/", stands_for)):
        return f"{case.file} is not named"
    return ""
