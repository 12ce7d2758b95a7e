"""Predicted against measured seconds of the quickstart's GRPO calls, after `realgraph profile` on this machine.

Claim: the median error over all calls and settings is at most 15 %, and of each axis of parallelism likewise. Settings
differ in data-parallel ranks and in the size of micro-batches; and two devices cut training and inference along each
axis that the engines have, ep with a small Qwen3-MoE. They run interleaved, five times each, in short runs whose steps
do the same work every time; the least seconds of each step count, and the spread of the repeats stands beside them.
Lengths are given, as those of a finished run are: the first one's of the model. Under 5 minutes on two cores with dp
alone, a minute more for each axis: `python -m benchmarks.predictions [--rounds 5] [--axes dp tp]`. `--again FILE` keeps
what was measured on record, here or on another machine, and predicts it once more by the shipped factors.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.machine import describe
from realgraph.commands.quickstart import prepare_folder
from realgraph.commands.run import execute
from realgraph.planner.plan.axes import MeshAxis
from realgraph.planner.request.cost_table import CostTable
from realgraph.planner.request.engine_support import TORCH, Axis
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import search
from realgraph.profile.command import ProfileRequest, profile_command
from realgraph.profile.runs import StepRecorder
from realgraph.run.costs_record import with_lengths
from realgraph.run.running import PreparedRun, prepare
from realgraph.runtime.master.observer import StepRecord
from realgraph.runtime.master.step_metrics import planned_seconds
from realgraph.screen.terminal import Terminal

RESULTS = Path(__file__).parent / "results"
MOST_ERROR = 0.15
DEVICES = 2
WARM_STEPS = 40  # of fine-tuning: until responses have the length of an answer
STEPS, WARM_UP = 5, 2  # of a run, and of them left out
MESH_CALLS = ("rollout", "ref_logp", "train")
AXES: tuple[MeshAxis | Axis, ...] = ("dp", *TORCH.axes)
WARM, EXPERTS = "warm", "experts"  # models


@dataclass(frozen=True)
class Setting:
    """Devices, the axis that cuts training and inference over them, tokens of a micro-batch there, and tokens of the
    cache of generation, which is data-parallel."""

    devices: int
    microbatch_tokens: int
    cache_tokens: int
    axis: MeshAxis | Axis = "dp"

    def __str__(self) -> str:
        return f"{self.axis} {self.devices}, micro-batches of {self.microbatch_tokens}, cache of {self.cache_tokens}"

    @property
    def model(self) -> str:
        """The folder of its model."""
        return EXPERTS if self.axis == "ep" else WARM

    def allocation(self) -> dict[str, dict[str, Any]]:
        """Pins for the calls of the run file."""
        packed = {
            "devices": self.devices,
            **{axis: self.devices if axis == self.axis else 1 for axis in ("tp", "pp", "cp", "ep")},
            "sharding": "replicated",
            "max_tokens_per_microbatch": self.microbatch_tokens,
        }
        generate = {"devices": self.devices, "kv_cache_tokens": self.cache_tokens}
        return {"rollout": generate, "ref_logp": packed, "train": packed}


def settings_of(axes: Sequence[MeshAxis | Axis]) -> tuple[Setting, ...]:
    """Three for each number of data-parallel ranks, and two for each other axis."""
    sizes = ((4096, 8192), (1024, 1024), (512, 2048))
    found = [Setting(dp, *size) for dp in (1, 2) for size in sizes if "dp" in axes]
    return (*found, *(Setting(DEVICES, *size, axis) for axis in axes if axis != "dp" for size in sizes[::2]))


@dataclass
class Row:
    """One call under one setting: seconds of the quickest repeats, and (median - least) / least of all repeats."""

    setting: Setting
    call: str
    measured: float
    spread: float
    predicted: float
    shipped: float = field(default=0.0)

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def shipped_error(self) -> float:
        """Relative error with the factors that come with the planner."""
        return abs(self.shipped / self.measured - 1)


def make_home(home: Path) -> None:
    """The quickstart's folder with a model that answers in the right form."""
    prepare_folder(home, "grpo", seed=1)
    warm_model(home)
    if "ep" in AXES:
        write_experts(home)


def warm_model(home: Path) -> None:
    """Fine-tune the model of a quickstart's folder for a few steps, and link it as `warm`."""
    changes = [f"outputs.dir={home / 'sft'}", f"steps={WARM_STEPS}", "eval=null"]
    outcome = execute(prepare(home / "sft.yaml", changes, None), Terminal(quiet=True))
    if outcome.saved is None:
        raise RuntimeError(f"the warm-up failed: {outcome.reason}")
    (home / WARM).symlink_to(outcome.saved / "actor")


def write_experts(home: Path) -> None:
    """A random Qwen3-MoE of the quickstart's shape, with eight experts of which a token passes two."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(home / WARM)
    shape = json.loads((home / WARM / "config.json").read_text(encoding="utf-8"))
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    known = {name: shape[name] for name in (*kept, "max_position_embeddings", "eos_token_id", "pad_token_id")}
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **known, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, tie_word_embeddings=True
    )
    Qwen3MoeForCausalLM(config).save_pretrained(home / EXPERTS)
    tokenizer.save_pretrained(home / EXPERTS)


def prepared(home: Path, setting: Setting, number: int) -> PreparedRun:
    """The quickstart's run file with a reference model and next to no learning: each repeat computes the same."""
    changes = {
        "params.kl_coef": 0.01,
        "params.lr": 1e-9,
        "models.actor.path": str(home / setting.model),
        "models.ref.path": str(home / setting.model),
        "eval": None,
        "steps": STEPS,
        "cluster.devices": DEVICES,
        "outputs.dir": str(home / f"run-{number}"),
        "allocation": setting.allocation(),
    }
    return prepare(home / "grpo.yaml", [f"{path}={json.dumps(value)}" for path, value in changes.items()], None)


def run(home: Path, setting: Setting, number: int) -> list[StepRecord]:
    """The steps of one short run after its warm-up."""
    seen = StepRecorder()
    outcome = execute(prepared(home, setting, number), Terminal(quiet=True), (seen,))
    if not outcome.ok:
        raise RuntimeError(f"{setting}: {outcome.reason}")
    return seen.records[WARM_UP:]


def predictions(request: PlanRequest, table: CostTable) -> Mapping[str, float]:
    """Seconds that the planner predicts for the pinned calls with these costs."""
    return planned_seconds(search(replace(request, costs=table)))


def compare(home: Path, table: CostTable, settings: Sequence[Setting], rounds: int) -> list[Row]:
    """Run all settings `rounds` times, one after the other, and set the quickest steps beside the predictions."""
    repeats: dict[Setting, list[list[StepRecord]]] = {setting: [] for setting in settings}
    number = 0
    for _ in range(rounds):
        for setting in settings:
            repeats[setting].append(run(home, setting, number))
            number += 1
    rows = []
    for setting, request in requests_of(home, {setting: runs[0] for setting, runs in repeats.items()}):
        ours, shipped = predictions(request, table), predictions(request, CostTable())
        for call in MESH_CALLS:
            least, spread = quickest(repeats[setting], call)
            rows.append(Row(setting, call, least, spread, ours[call], shipped[call]))
    return rows


def requests_of(home: Path, runs: Mapping[Setting, Sequence[StepRecord]]) -> Iterator[tuple[Setting, PlanRequest]]:
    """Each setting's request, with the lengths of the first run of its model."""
    first: dict[str, Sequence[StepRecord]] = {}
    for number, (setting, steps) in enumerate(runs.items()):
        first.setdefault(setting.model, steps)
        prepared_run = prepared(home, setting, len(runs) + number)
        yield setting, with_lengths(prepared_run.request, first[setting.model])


def predict_again(file: Path) -> None:
    """Replace what the shipped factors said of a record's rows by what they say now."""
    record = json.loads(file.read_text(encoding="utf-8"))
    settings = list(dict.fromkeys(Setting(**row["setting"]) for row in record["rows"]))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "quickstart"
        make_home(home)
        first = {setting.model: setting for setting in reversed(settings)}
        steps = {model: run(home, setting, number) for number, (model, setting) in enumerate(first.items())}
        found = {
            setting: predictions(request, CostTable())
            for setting, request in requests_of(home, {setting: steps[setting.model] for setting in settings})
        }
    for row in record["rows"]:
        row["shipped"] = found[Setting(**row["setting"])][row["call"]]
        row["shipped_error"] = abs(row["shipped"] / row["measured"] - 1)
    record["median_error_by_shipped_factors"] = statistics.median(row["shipped_error"] for row in record["rows"])
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"median error by shipped factors {record['median_error_by_shipped_factors']:.0%}")


def quickest(repeats: Sequence[Sequence[StepRecord]], call: str) -> tuple[float, float]:
    """Mean over steps of the least seconds of their repeats; and by how much the median repeat was slower."""
    least, median = [], []
    for same in zip(*repeats, strict=True):
        seconds = [step.metrics[f"{call}/seconds"] for step in same]
        least.append(min(seconds))
        median.append(statistics.median(seconds))
    return statistics.mean(least), statistics.mean(median) / statistics.mean(least) - 1


def show(rows: Sequence[Row]) -> None:
    """A line a call and setting."""
    print(f"{'call':<9} {'setting':<46} {'measured':>9} {'spread':>7} {'predicted':>9} {'error':>6} {'shipped':>8}")
    for row in rows:
        print(
            f"{row.call:<9} {row.setting!s:<46} {row.measured * 1e3:>6.1f} ms {row.spread:>6.0%} "
            f"{row.predicted * 1e3:>6.1f} ms {row.error:>6.0%} {row.shipped_error:>8.0%}"
        )


def main() -> int:
    """Profile, run, compare; 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--costs", type=Path, help="a table of `realgraph profile` on this machine, to save the time")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--again", type=Path, help="a record of this benchmark")
    asked = parser.parse_args()
    if asked.again is not None:
        predict_again(asked.again)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name) / "quickstart"
        out = Path(name) / "costs.json"
        if asked.costs is None:
            table = profile_command(ProfileRequest(devices=DEVICES), out)
        else:
            table = msgspec.json.decode(asked.costs.read_bytes(), type=CostTable)
        make_home(home)
        rows = compare(home, table, settings_of(asked.axes), asked.rounds)
    show(rows)
    error = statistics.median(row.error for row in rows)
    spread = statistics.median(row.spread for row in rows)
    shipped = statistics.median(row.shipped_error for row in rows)
    seconds = time.monotonic() - began
    print(
        f"median error {error:.0%}, spread of repeats {spread:.0%}, by shipped factors {shipped:.0%}; {seconds:.0f} s"
    )
    by_axis = {axis: statistics.median(row.error for row in rows if row.setting.axis == axis) for axis in asked.axes}
    print("by axis: " + ", ".join(f"{axis} {median:.0%}" for axis, median in by_axis.items()))
    met = max(error, *by_axis.values()) <= MOST_ERROR
    print("PASS" if met else "FAIL", f"median error <= {MOST_ERROR:.0%}, and of each axis")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "machine": describe(),
        "load_average": os.getloadavg(),
        "median_error": error,
        "median_error_by_axis": by_axis,
        "median_spread": spread,
        "median_error_by_shipped_factors": shipped,
        "seconds": seconds,
        "rounds": asked.rounds,
        "costs": msgspec.to_builtins(table),
        "rows": [asdict(row) | {"error": row.error, "shipped_error": row.shipped_error} for row in rows],
    }
    (RESULTS / "predictions.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
