"""The engines on one NVIDIA GPU beside what the GPU can do, and beside what the planner says of it.

Run from the repository root on a machine with a GPU: `python -m benchmarks.gpu_engines [--costs costs.json]`; without
one, `--toy` runs toy models on the CPU and writes nothing. The engines train, score and generate with random Qwen3
models of the published shapes, in bfloat16. The limits are measured in the same run: the rate of a product of matrices
of 8,192 columns and the bandwidth of a copy of a gigabyte. A pass is compared with the products of its weights (2
operations for each weight and token, 6 in training) and of its causal attention at that rate: the share is the MFU, of
the measured limit instead of the data sheet's. A decode step is compared with the seconds that reading all weights and
the cache once takes; `eager` is the step without CUDA graphs. The planner's predictions stand beside it by the
factors that come with it and, with `--costs`, by those that `realgraph profile` has measured.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import describe
from realgraph.planner.costs.calibrate.fit_profile import predicted_seconds
from realgraph.planner.costs.calibrate.measurements import (
    Case,
    DecodeCase,
    DeviceCopy,
    Gemm,
    Pass,
    ProfileTask,
    RolloutCase,
    toy_model,
)
from realgraph.planner.costs.engine_overheads import with_overheads
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.request.cost_table import load_costs
from realgraph.planner.request.engine_support import run_support
from realgraph.run.requests import cluster_of
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.profile.engines import EngineCase, ProfiledEngines
from realgraph.runtime.profile.files import write_task
from realgraph.runtime.profile.kernels import kernel
from realgraph.runtime.worker.resources import pick_device

RESULTS = Path(__file__).parent / "results" / "gpu_engines.json"
REPEATS = 3


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> ModelSpec:
    """A Qwen3 as published (arXiv:2505.09388, table 1): 8 heads of keys, heads of 128, 151,936 tokens."""
    return ModelSpec(
        architecture="qwen3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        vocab=151936,
        tied=tied,
        max_positions=40960,
        qk_norm=True,
    )


MODELS = {
    "0.6B": qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": qwen3(2048, 28, 16, 6144, tied=True),
    "4B": qwen3(2560, 36, 32, 9728, tied=True),
    "8B": qwen3(4096, 36, 32, 12288, tied=False),
}


@dataclass(frozen=True)
class Limits:
    """The device at its best: operations and bytes (read and written) a second."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Row:
    """One case. seconds: the least of the repeats. floor: the seconds that the limits allow. shipped, profiled: seconds
    predicted."""

    model: str
    case: str
    seconds: float
    floor: float
    shipped: float | None
    profiled: float | None


def cases() -> dict[str, list[EngineCase]]:
    """By model: passes and a whole rollout of those that one GPU of 80 GB trains, decode steps of one that it serves,
    too."""
    found: dict[str, list[EngineCase]] = {}
    for name in ("0.6B", "1.7B"):
        model = MODELS[name]
        found[name] = [Pass(model, 16, 1024, 2, train) for train in (False, True)]
        sizes = ((64, 512),) if name == "0.6B" else ((1, 512), (64, 512), (256, 512), (64, 4096))
        found[name] += [DecodeCase(model, *size, graphs) for size in sizes for graphs in (True, False)]
    found["1.7B"].append(RolloutCase(MODELS["1.7B"], 16, 8, 256, 256, 128))
    found["8B"] = [DecodeCase(MODELS["8B"], 1, 512), DecodeCase(MODELS["8B"], 64, 1024)]
    return found


def toy_cases() -> dict[str, list[EngineCase]]:
    """Small enough for a core."""
    model = toy_model(64, 2, 64)
    passes = [Pass(model, 8, 16, 2, train) for train in (False, True)]
    return {"toy": [*passes, DecodeCase(model, 8, 32), RolloutCase(model, 2, 2, 8, 6, 4)]}


def floor_seconds(case: EngineCase, limits: Limits) -> float:
    """Seconds that no program can go below by much: products at the measured rate; weights and caches read once."""
    model = case.model
    weights = model.active_params() + model.vocab * model.hidden
    per_token = 2.0 * model.layers * 2 * model.kv_heads * model.head_dim  # bytes of keys and values in bfloat16
    match case:
        case Pass():
            tokens = case.samples * case.length
            scores = 2.0 * model.layers * model.heads * model.head_dim * case.samples * case.length**2
            return (2.0 * weights * tokens + scores) * (3 if case.train else 1) / limits.flops
        case DecodeCase():
            return (2.0 * weights + case.running * case.context * per_token) / limits.bytes
        case RolloutCase():
            samples = case.groups * case.per_group
            waves = -(-samples // case.running)
            read = case.new * 2.0 * weights * waves + samples * case.new * (case.prompt + case.new / 2) * per_token
            return read / limits.bytes


def repeated(run: Callable[[], float], repeats: int = REPEATS) -> float:
    """The least seconds, after one run that warms up."""
    run()
    return min(run() for _ in range(repeats))


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """The seconds of `run` on the device."""

    def seconds() -> float:
        sync()
        began = time.perf_counter()
        run()
        sync()
        return time.perf_counter() - began

    return seconds


def sync() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits:
    """The measured rates of a large product and of a large copy."""
    gemm, copy = (
        (Gemm(8192, 8192), DeviceCopy(1 << 30)) if device.type == "cuda" else (Gemm(256, 256), DeviceCopy(1 << 20))
    )
    product = repeated(timed(kernel(gemm, device, dtype)), 10)
    moved = repeated(timed(kernel(copy, device, dtype)), 10)
    return Limits(2.0 * gemm.tokens * gemm.width**2 / product, 2.0 * copy.nbytes / moved)


@dataclass(frozen=True)
class Bench:
    """The device, its limits and its kind as the planner knows it."""

    folder: Path
    cluster: Cluster
    dtype: DType
    limits: Limits
    factors: EfficiencyFactors | None

    def rows(self, name: str, cases: Sequence[EngineCase]) -> Iterator[Row]:
        """Measure the cases of one model. Its masters and moments are given up with the last of them."""
        engines = ProfiledEngines(self.dtype, LayoutRanks.alone(pick_device(0)), self.folder)
        shipped = device_kind(self.cluster.kind).costs
        if not self.cluster.is_cpu:  # of which the factors were measured with the engines
            shipped = with_overheads(shipped, run_support().overheads, apart=False)
        for case in cases:
            seconds = repeated(engines.prepare(case))
            predicted = [
                None if costs is None else predicted_seconds(case, self.cluster, self.dtype, costs)
                for costs in (shipped, self.factors)
            ]
            yield Row(name, described(case), seconds, floor_seconds(case, self.limits), *predicted)


def described(case: Case) -> str:
    """A case in a few words."""
    match case:
        case Pass(train=train):
            return f"{'train' if train else 'logprobs'} {case.samples} x {case.length}"
        case DecodeCase():
            return f"decode {case.running} at {case.context}{'' if case.cuda_graphs else ', eager'}"
        case RolloutCase():
            return f"rollout {case.groups * case.per_group} x {case.prompt}+{case.new}"
        case _:
            raise TypeError(f"no case of an engine: {case}")


def line(row: Row) -> str:
    """One line of the table."""
    predicted = "".join("" if one is None else f"{one / row.seconds:10.2f}" for one in (row.shipped, row.profiled))
    return f"{row.model:>5} {row.case:<26} {1e3 * row.seconds:10.2f} {row.floor / row.seconds:8.1%}{predicted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, help="of realgraph profile on this machine")
    parser.add_argument("--toy", action="store_true", help="toy models; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    asked = toy_cases() if given.toy else cases()
    cluster = cluster_of(ClusterSpec(devices=1))
    dtype: DType = "float32" if cluster.is_cpu else "bfloat16"
    limits = limits_of(pick_device(0), torch.float32 if cluster.is_cpu else torch.bfloat16)
    print(f"{cluster.kind}: {limits.flops / 1e12:.1f} TFLOP/s, {limits.bytes / 1e9:.0f} GB/s measured", flush=True)
    print(f"model {'case':<26} {'ms':>10} {'of limit':>8} {'shipped':>9} {'profiled':>9}", flush=True)
    factors = None if given.costs is None else load_costs(given.costs).factors
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        write_task(ProfileTask(tuple(case for own in asked.values() for case in own), cluster, dtype), Path(name))
        bench = Bench(Path(name), cluster, dtype, limits, factors)
        for model, own in asked.items():
            for row in bench.rows(model, own):
                rows.append(row)
                print(line(row), flush=True)
                write(given, limits, rows)


def write(given: argparse.Namespace, limits: Limits, rows: Sequence[Row]) -> None:
    """The rows so far, but of toys."""
    if not given.toy:
        found = {"machine": describe(), "limits": asdict(limits), "rows": [asdict(row) for row in rows]}
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
