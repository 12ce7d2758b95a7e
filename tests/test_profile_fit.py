"""Factors fitted to measurements: what hidden factors make of the formulas, the found ones predict."""

import math
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from realgraph.graphs.errors import Where
from realgraph.planner.costs.calibrate.calibrate import Point, fit_costs
from realgraph.planner.costs.calibrate.fit_profile import FIT_STAGES, predicted_seconds, profiled
from realgraph.planner.costs.calibrate.measurements import (
    Collective,
    Measured,
    cases_of,
    config_json,
    merged,
    toy_model,
)
from realgraph.planner.costs.memory.terms import DType
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import spec_from_config

MACHINE = Probe(cores=4, host_memory_bytes=8_000_000_000)
KINDS = ("cpu", "A100-80", "H100-SXM")


def cluster(kind: str, devices: int) -> Cluster:
    return resolve(ClusterSpec(kind=kind, devices=devices), MACHINE)


def hidden_costs(kind: str, rng: random.Random) -> EfficiencyFactors:
    """Factors up to 1.6 times off the shipped ones, and some fixed seconds."""
    shipped = device_kind(kind).costs
    scale = 1.0 if kind == "cpu" else 0.05

    def off(value: float) -> float:
        return value * math.exp(rng.uniform(-0.5, 0.5))

    return replace(
        shipped,
        gemm=off(shipped.gemm),
        gemm_tokens=off(shipped.gemm_tokens),
        gemm_width=off(shipped.gemm_width),
        attention=off(shipped.attention),
        memory=off(shipped.memory),
        kv=off(shipped.kv),
        link=off(shipped.link),
        host=off(shipped.host),
        step_seconds=off(shipped.step_seconds),
        layer_seconds=off(shipped.layer_seconds),
        sequence_seconds=off(shipped.sequence_seconds),
        elementwise=off(shipped.memory / 2),
        optimizer=off(shipped.memory),
        backward=rng.uniform(1.6, 2.6),
        pass_layer_seconds=off(3e-4 * scale),
        microbatch_seconds=off(1e-3 * scale),
        optimizer_step_seconds=off(1e-3 * scale),
        collective_seconds=off(1e-4 * scale),
        gather=off(shipped.link / 2),
        gather_seconds=off(2e-4 * scale),
        scatter=off(shipped.link / 3),
        scatter_seconds=off(3e-4 * scale),
        exchange=off(shipped.link / 2),
        exchange_seconds=off(1e-4 * scale),
        p2p=off(shipped.link),
        p2p_seconds=off(5e-5 * scale),
        call_seconds=off(1e-3 * scale),
        sample_seconds=0.0,  # none of the cases has samples that are stored
        admission_seconds=off(3e-5 * scale),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_found_factors_predict_what_hidden_ones_took(kind: str, seed: int) -> None:
    node, rng = cluster(kind, 2), random.Random(seed)
    hidden = hidden_costs(kind, rng)
    dtype: DType = "float32" if kind == "cpu" else "bfloat16"
    measured = [Measured(case, predicted_seconds(case, node, dtype, hidden)) for case in cases_of(node)]
    found = profiled(measured, node, dtype)
    gpus_only = {"host copies"} if kind == "cpu" else set()
    assert {stage.name for stage in found.stages} == {name for name, _ in FIT_STAGES} - gpus_only
    assert kind == "cpu" or found.costs.host == pytest.approx(hidden.host, rel=0.05)
    costs = replace(found.costs, sample_seconds=0.0)
    for one in measured:
        seconds = predicted_seconds(one.case, node, dtype, costs)
        assert seconds == pytest.approx(one.seconds, rel=0.2), one.case
    assert all(stage.error < 0.08 for stage in found.stages), found.stages


def test_nothing_measured_leaves_the_kind_s_own_factors() -> None:
    node = cluster("cpu", 2)
    assert profiled([], node, "float32").costs == device_kind("cpu").costs


@pytest.mark.parametrize("seed", range(10))
def test_what_no_point_tells_stays_where_it_was(seed: int) -> None:
    rng, start = random.Random(seed), device_kind("cpu").costs
    true = start.gemm * math.exp(rng.uniform(-1, 1))

    def seconds_of(n: float) -> Callable[[EfficiencyFactors], float]:
        return lambda costs: n / costs.gemm

    points = [Point(seconds_of(n), n / true) for n in (1.0, 3.0, 9.0)]
    found = fit_costs(start, ("gemm", "attention"), points)
    assert found.costs.gemm == pytest.approx(true, rel=0.02)
    assert found.costs.attention == pytest.approx(start.attention, rel=1e-6)
    assert found.error < 0.02


def test_points_with_large_errors_count_less() -> None:
    start = device_kind("cpu").costs
    points = [Point(lambda costs: 1 / costs.gemm, 1.0, 0.02), Point(lambda costs: 1 / costs.gemm, 4.0, 1.0)]
    assert fit_costs(start, ("gemm",), points).costs.gemm == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (192, 4), (1024, 4), (4096, 4)])
def test_a_toy_model_is_what_its_configuration_says(hidden: int, layers: int) -> None:
    model = toy_model(hidden, layers, 64)
    assert spec_from_config(config_json(model, "float32"), Where("config.json")) == model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_group_size_is_measured_once(kind: str, devices: int) -> None:
    cases = cases_of(cluster(kind, devices))
    assert len(set(cases)) == len(cases)
    groups = [(case.op, case.ranks) for case in cases if isinstance(case, Collective)]
    sizes = {size for size in (2, 4) if size <= devices}
    assert set(groups) == {
        (op, size)
        for op in ("allreduce", "gather", "scatter", "exchange", "p2p")
        for size in sizes
        if op != "p2p" or size == 2
    }


def test_the_slowest_worker_s_seconds_count() -> None:
    cases = cases_of(cluster("cpu", 2))
    rng = random.Random(0)
    workers = [[Measured(case, rng.uniform(1, 2), rng.random(), 3) for case in cases] for _ in range(3)]
    for i, one in enumerate(merged(workers)):
        assert one.case == cases[i]
        assert one.seconds == max(worker[i].seconds for worker in workers)
        assert one.spread == max(worker[i].spread for worker in workers)
