"""Published training rows as requests: the search under pins, and a plan's own memory, say what the benchmark says."""

from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.published import Row
from benchmarks.published_case import TRAIN, Case, priced
from benchmarks.published_memory import footprint, groups_of, margin_of
from benchmarks.published_steps import ROOM_BYTES, plan_for
from benchmarks.published_train import cases
from realgraph.planner.costs.memory.memory import StateShare
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.pins import Pin

COMMON = {
    "source": "s",
    "phase": "train",
    "metric": "throughput_per_gpu",
    "unit": "tokens/s/gpu",
    "value": "5000",
    "seq_len": "4096",
    "global_batch": "256",
    "micro_batch": "1",
}
MEGATRON = {
    "system": "Megatron-LM",
    "model": "Llama 2 70B",
    "gpu": "H100-80GB",
    "n_gpus": "64",
    "tp": "4",
    "pp": "4",
    "dp": "4",
    "notes": "selective recompute",
}
ROWS = {
    "fsdp": {"system": "torchtitan", "model": "Llama-3-8B", "gpu": "H100-80GB", "n_gpus": "64", "tp": "1", "dp": "64"},
    "recomputed": {
        "system": "llm-foundry (Composer FSDP)",
        "model": "MPT-7b",
        "gpu": "A100-80GB",
        "n_gpus": "8",
        "tp": "1",
        "dp": "8",
        "notes": "act-ckpt=true",
    },
    "stages": MEGATRON,
    "interleaved": {**MEGATRON, "notes": "selective recompute; VP=5"},
}


def case_of(name: str) -> Case:
    row = replace(Row(*[""] * len(Row.__struct_fields__)), **{**COMMON, **ROWS[name]})
    (case,) = cases([row])
    return case


def plan_of(case: Case) -> Plan:
    """The plan that a search finds where everything is pinned to what ran."""
    layout = case.layout
    settings: dict[str, Any] = dict(case.option.settings)
    pin = Pin(first=0, devices=layout.mesh.n_devices, **settings)
    roomy = replace(case.request.cluster, memory_bytes=ROOM_BYTES)
    plan = plan_for(replace(case.request, cluster=roomy, pins={TRAIN: pin}))
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_predicted_as_the_plan_that_its_pins_leave(name: str) -> None:
    case = case_of(name)
    planned, own = plan_of(case).allocations[TRAIN], priced(case.request, case.option)
    assert planned.seconds == pytest.approx(case.seconds(case.option.recompute), rel=1e-12)
    assert (planned.layout.stages, planned.microbatches) == (case.layout.stages, own.microbatches)
    assert planned.seconds == pytest.approx(own.seconds, rel=1e-12)


@pytest.mark.parametrize("name", ["stages", "interleaved"])
def test_the_memory_of_a_row_is_that_of_its_plan(name: str) -> None:
    """Megatron's states and activations need nothing besides: only the counters of peaks do not see communicators."""
    case = case_of(name)
    planned = plan_of(case).allocations[TRAIN]
    assert planned.peak_bytes == footprint(case).total + groups_of(case)
    assert planned.bound_bytes == planned.peak_bytes + margin_of(case)


@pytest.mark.parametrize("name", ["stages", "interleaved"])
def test_a_plan_counts_what_its_engine_keeps(name: str) -> None:
    case = case_of(name)
    request, option = case.request, case.option
    held = priced(request, option).peak_bytes

    def with_engine(**changes: Any) -> int:
        return priced(replace(request, engine=replace(request.engine, **changes)), option).peak_bytes

    assert with_engine(states=StateShare(distributed=False)) > held
    assert with_engine(states=StateShare(trained=0.01)) < held
    assert with_engine(passes=replace(request.engine.passes, sequence_parallel=False)) > held
    assert with_engine(passes=replace(request.engine.passes, logit_bytes=0)) <= held
