"""Micro-batches of train calls: what pins and plans may say of them, what they cost, and what stages keep."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.errors import ConfigError
from realgraph.graphs.facts import Facts
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import ModelRole, Train
from realgraph.planner.advise.alternatives import alternatives
from realgraph.planner.costs.memory import memory
from realgraph.planner.costs.memory.memory import Running
from realgraph.planner.feasibility.changes import WAYS
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import input_bytes, input_seconds, train_work
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.footprints import holding
from realgraph.planner.options.passes import schedule_fault
from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute, Schedule
from realgraph.planner.plan.option import PLAIN, CallOption
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.engine_support import TORCH, Axis
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import Infeasible, reprice, search
from tests.generating import beside_tree
from tests.planner_cases import cluster, graph, known, ppo, request
from tests.strategies import spec_of, where

BF16 = ModelRole(trainable=True, dtype="bfloat16")
QUICK = Limits(gap=0.01, seconds=20.0)
WORK = Workload(256, 1, 512, 2048, 600.0)
PPO: PlanRequest = request(ppo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2), workload=WORK)
STAGES: dict[str, Pin] = {"actor_train": Pin(tp=4, pp=2), "critic_train": Pin(tp=4, pp=2)}


def pinned(**fields: object) -> PlanRequest:
    """The request with the actor's training pinned to these fields."""
    return replace(PPO, pins={"actor_train": replace(Pin(), **fields)})


def refused(asked: PlanRequest) -> str:
    with pytest.raises(ConfigError) as raised:
        search(asked, QUICK)
    return "\n".join(f"{problem.where.path} {problem.text}" for problem in raised.value.problems)


# --- pins -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_is_pinned_is_what_is_planned(recompute: Recompute, schedule: Schedule) -> None:
    chunks = 2 if schedule == "interleaved" else None
    plan = search(pinned(tp=4, pp=2, recompute=recompute, schedule=schedule, chunks=chunks), QUICK)
    found = plan.allocations["actor_train"]
    assert (found.recompute, found.schedule, found.chunks) == (recompute, schedule, chunks or 1)
    assert validate(plan, PPO) == ()
    again = reprice(PPO, plan)
    assert again.allocations == plan.allocations
    assert again.reallocation_transport == plan.reallocation_transport


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schedule": "interleaved", "pp": 1}, "needs pipeline stages"),
        ({"schedule": "1f1b", "chunks": 2}, "needs schedule interleaved"),
        ({"schedule": "interleaved", "chunks": 1, "pp": 2}, "two chunks or more"),
        ({"pp": 8, "chunks": 5}, "more than the 32 layers"),
    ],
)
def test_passes_that_nothing_can_run_are_named(fields: dict[str, Any], says: str) -> None:
    text = refused(pinned(**fields))
    assert says in text and "$.allocation.actor_train" in text


@pytest.mark.parametrize(("axes", "says"), [(("tp",), "run no pipeline"), (("pp",), "run no interleaved pipeline")])
def test_schedules_that_the_engines_lack_are_named(axes: tuple[Axis, ...], says: str) -> None:
    lacking = replace(TORCH, axes=axes, schedules=("1f1b",))
    assert says in refused(replace(pinned(schedule="interleaved"), engine=lacking))


def test_passes_are_of_train_calls_and_models_may_force_recomputation() -> None:
    assert "belong to train calls" in refused(replace(PPO, pins={"generate": Pin(recompute="full")}))
    models = {name: replace(role, gradient_checkpointing=True) for name, role in PPO.graph.models.items()}
    forced = replace(pinned(recompute="selective"), graph=replace(PPO.graph, models=models))
    assert "models.actor.gradient_checkpointing is true" in refused(forced)


def test_a_pin_that_keeps_too_much_is_told_what_keeps_less() -> None:
    """One train call alone, with memory half-way between what it takes and what less of its activations would leave."""
    lone = graph({"train": Train(model="actor", loss=Loss({}))}, [], {"actor": BF16})
    base = request(lone, "meta-llama/Llama-3.1-8B", cluster(), workload=WORK)
    pins = {way: {"train": Pin(tp=4, pp=2, recompute=way, schedule="interleaved")} for way in WAYS}
    least = {}
    for way in WAYS:
        asked = replace(base, pins=pins[way])
        offered = candidates(asked, "train", DeviceMesh(0, 8), asked.cluster)
        held = [holding(asked, "train", candidate, asked.cluster) for candidate in offered]
        least[way] = min(one.resident.total + one.active.total + one.margin for one in held)
    tight = Constraints(memory_gb=(least["none"] + least["selective"]) / 2e9, offload=False)
    with pytest.raises(Infeasible) as raised:
        search(replace(base, pins=pins["none"], constraints=tight), QUICK)
    assert "set allocation.train.recompute: selective" in raised.value.changes
    assert search(replace(base, pins=pins["selective"], constraints=tight), QUICK).period_seconds > 0


def test_two_train_calls_of_one_role_find_the_same_layers_on_every_stage() -> None:
    train = PPO.graph.calls["actor_train"]
    twice = graph({"train": train, "again": train}, [], {"actor": BF16})
    asked = request(twice, "meta-llama/Llama-3.1-8B", cluster(nodes=2), workload=WORK)
    for call in twice.calls:
        offered = candidates(asked, call, DeviceMesh(0, 16), asked.cluster)
        assert {one.schedule for one in offered} == {"1f1b"}
    text = refused(replace(asked, pins={"train": Pin(pp=2, schedule="interleaved")}))
    assert "'again', which trains the same role" in text


def test_forbidden_schedules_leave_the_others() -> None:
    forbid: dict[str, tuple[Pin, ...]] = {name: (Pin(schedule="interleaved"),) for name in STAGES}
    plan = search(replace(PPO, pins=STAGES, constraints=Constraints(forbid=forbid)), QUICK)
    assert all(plan.allocations[name].schedule == "1f1b" for name in STAGES)
    free = search(replace(PPO, pins=STAGES), QUICK)
    assert free.period_seconds <= plan.period_seconds * 1.01
    assert all(free.allocations[name].schedule == "interleaved" for name in STAGES)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "fields", "path"),
    [
        ("actor_train", {"schedule": "interleaved"}, "$.allocations.actor_train.schedule"),
        ("actor_train", {"chunks": 2}, "$.allocations.actor_train.schedule"),
        ("values", {"recompute": "full"}, "$.allocations.values"),
        ("generate", {"schedule": "interleaved", "chunks": 2}, "$.allocations.generate"),
    ],
)
def test_an_edited_plan_with_passes_that_can_not_be_is_refused(call: str, fields: dict[str, object], path: str) -> None:
    plan = search(replace(PPO, pins={"actor_train": Pin(pp=1)}), QUICK)
    edited = replace(plan, allocations={**plan.allocations, call: replace(plan.allocations[call], **fields)})
    assert path in {problem.where.path for problem in validate(edited, PPO, "plan.json")}


def test_engines_are_given_the_recomputation_that_they_know_and_refuse_other() -> None:
    asked = replace(PPO, engine=TORCH, models=dict.fromkeys(PPO.models, known("Qwen/Qwen3-0.6B")))
    plan = search(asked, QUICK)
    knows_none = replace(asked, engine=replace(TORCH, recompute=("none",)))
    for recompute in ("selective", "full"):
        train = replace(plan.allocations["actor_train"], recompute=recompute)
        edited = replace(plan, allocations={**plan.allocations, "actor_train": train})
        assert validate(edited, asked) == ()
        (problem,) = validate(edited, knows_none, "plan.json")
        assert problem.where.path == "$.allocations.actor_train.recompute"
        assert f"recompute is {recompute}" in problem.text and "know none only" in problem.text
        assert f"recompute is {recompute}" in refused(
            replace(knows_none, pins={"actor_train": Pin(recompute=recompute)})
        )


def test_explanations_name_the_passes_of_other_options() -> None:
    asked = replace(PPO, pins=STAGES)
    plan = search(asked, QUICK)
    found = alternatives(replace(asked, pins={}), plan, "actor_train")
    assert {one.option.passes for one in found} > {PLAIN}


# --- what stages keep -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")),
    st.sampled_from((2, 4, 8)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from(("none", "selective", "full")),
)
def test_stages_keep_what_the_papers_say(name: str, pp: int, tp: int, recompute: Recompute) -> None:
    """First stage: p (1 + (p - 1) / (p v)) micro-batches interleaved (arXiv:2205.05198), p otherwise. Only the critic,
    whose last stage has no logits, shows it alone."""
    model, critic = known(name), replace(BF16, head="value")
    layout = Layout(DeviceMesh(0, tp * pp), tp=tp, pp=pp)

    def kept(tokens: int = 8192, **how: object) -> float:
        running = replace(Running(recompute=recompute), **how)
        return memory.train_activations(model, critic, layout, tokens, running).activations

    plain, single = kept(), kept(microbatches=1)
    each = (plain - single) / (pp - 1) if pp > 1 else 0.0  # of one micro-batch
    for chunks in (2, 4):
        assert kept(chunks=chunks) == pytest.approx(plain + each * (pp - 1) / chunks, rel=1e-3)
        assert plain < kept(chunks=2 * chunks) < kept(chunks=chunks)


@pytest.mark.parametrize("layers", range(2, 40))
def test_a_schedule_without_fault_gives_every_chunk_a_layer(layers: int) -> None:
    one, model = CallOption(Layout(DeviceMesh(0, 1)), 1), replace(known("meta-llama/Llama-3.1-8B"), layers=layers)
    for stages in range(1, 9):
        for chunks in range(1, 9):
            asked = CallOption(Layout(DeviceMesh(0, stages), pp=stages), 1, "none", "interleaved", chunks)
            sound = schedule_fault(asked, model, "value") == ""
            assert sound == (stages > 1 and chunks > 1 and stages * chunks <= layers)
    staged = replace(one, layout=Layout(DeviceMesh(0, 2), pp=2))
    plain = replace(one, recompute="full")
    assert schedule_fault(plain, model, "value") == schedule_fault(staged, model, "value") == ""


def test_a_head_leaves_its_stage_fewer_chunks() -> None:
    """Llama 3.1 8B's head is 2.4 layers: the last of four stages has six layers, in a plan that says so eight."""
    model = known("meta-llama/Llama-3.1-8B")
    asked = CallOption(Layout(DeviceMesh(0, 4), pp=4), 1, "none", "interleaved", 8)
    assert schedule_fault(asked, model, "lm") == "8 chunks are more than the 6 layers of a stage"
    assert schedule_fault(asked, model, "value") == schedule_fault(replace(asked, chunks=6), model, "lm") == ""
    said = replace(asked, layout=replace(asked.layout, stages=((1,) * 8,) * 4))
    assert schedule_fault(said, model, "lm") == ""


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_inputs_are_part_of_what_a_call_takes() -> None:
    plan = search(PPO, QUICK)
    for name, found in plan.allocations.items():
        expected = input_seconds(PPO, name, found.layout, PPO.cluster)
        assert found.input_seconds == expected
        assert (expected > 0) == (input_bytes(PPO, name) > 0)
        assert expected < found.seconds
    assert plan.allocations["generate"].input_seconds == 0.0  # prompts are read from the data set


def test_more_ranks_get_less_each_and_other_nodes_send_slowly() -> None:
    """256 samples of 1,112 tokens: eight bytes a token id."""
    assert input_bytes(PPO, "ref") == pytest.approx(256 * 1112 * 8)
    wide, narrow = (Layout(DeviceMesh(0, 8), dp=dp, tp=8 // dp) for dp in (8, 1))
    one_node = cluster(nodes=1)
    near = input_seconds(replace(PPO, cluster=one_node), "ref", narrow, one_node)
    far = input_seconds(PPO, "ref", narrow, PPO.cluster)
    assert input_seconds(PPO, "ref", wide, PPO.cluster) < far
    assert near < far
    alone = cluster(devices=1)
    assert input_seconds(replace(PPO, cluster=alone), "ref", Layout(DeviceMesh(0, 1)), alone) == 0.0


def test_every_call_that_reads_trained_weights_has_a_transport() -> None:
    plan = search(PPO, QUICK)
    assert plan.reallocation_transport.keys() == {"generate", "values"}
    for name, transport in plan.reallocation_transport.items():
        assert (transport == "in_place") == (plan.reallocation_seconds.get(name, 0.0) == 0.0)


def test_a_call_on_the_datas_sequences_has_one_a_group() -> None:
    asked = request(compile_graph(spec_of(beside_tree(8)), where, Facts()))
    option = CallOption(Layout(DeviceMesh(0, 1)), 4096)
    samples, sequences = (train_work(asked, name, option) for name in ("train", "sft"))
    assert samples.tokens == 8 * sequences.tokens
    assert (samples.samples_per_group, sequences.samples_per_group) == (8, 1)
    assert input_bytes(asked, "sft") == 0.0
