"""Experts spread over tp x cp x dp: the search proposes all that engines run, finds the best, and leaves out nothing
that a plan could need."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Literal

import pytest
from msgspec.structs import replace

from realgraph.graphs.graph import Graph
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import ModelRole, Train
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.meshes import family
from realgraph.planner.options.moves import Place, longer_moves, move_matrix
from realgraph.planner.options.passes import passes_for
from realgraph.planner.options.pricing import options_of
from realgraph.planner.options.tables import problem_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.problem import Limits, Solution
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.engine_support import SGLANG, TORCH
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.assembly import option_of
from realgraph.planner.search.baselines import megatron
from realgraph.planner.search.search import search
from realgraph.planner.search.whole_problem import whole_problem
from realgraph.planner.solve.solver import solve
from tests.planner_cases import cluster, graph, grpo, known, ppo, request

EXACT = Limits(gap=1e-6, seconds=60.0)
MIXTURE = "Qwen/Qwen3-30B-A3B"
SHARDINGS: tuple[Literal["replicated", "fsdp"], ...] = ("replicated", "fsdp")


def small(experts: int = 8, layers: int = 6) -> ModelSpec:
    """A mixture that a few devices train."""
    return replace(known(MIXTURE), layers=layers, expert_layers=layers, experts=experts, experts_per_token=2)


def mixture(algorithm: Graph, machine: Cluster, model: ModelSpec) -> PlanRequest:
    return replace(request(algorithm, MIXTURE, machine), models=dict.fromkeys(algorithm.models, model))


@pytest.mark.parametrize("call", ["generate", "ref", "critic_train"])
def test_every_spread_that_engines_run_is_proposed(call: str) -> None:
    """Every divisor of 12 experts and of the devices of a stage, whatever dp is."""
    asked = mixture(ppo(), cluster(), small(experts=12))
    found = {one.layout for one in candidates(asked, call, DeviceMesh(0, 8), asked.cluster)}
    for layout in found:
        stage = layout.tp * layout.cp * layout.dp
        spread = {other.ep for other in found if replace(other, ep=layout.ep) == layout}
        assert spread == {ep for ep in (1, 2, 4) if stage % ep == 0}, layout
    assert any(layout.dp % layout.ep for layout in found)


def test_servers_and_dense_models_have_none() -> None:
    asked = replace(mixture(grpo(), cluster(), small()), engine=SGLANG)
    assert {one.layout.ep for one in candidates(asked, "rollout", DeviceMesh(0, 8), asked.cluster)} == {1}
    dense = request(grpo(), machine=cluster())
    assert {one.layout.ep for one in candidates(dense, "train", DeviceMesh(0, 8), dense.cluster)} == {1}


# --- the best of all --------------------------------------------------------------------------------------------------


def alone(machine: Cluster) -> PlanRequest:
    """Training of a large mixture, and nothing else."""
    role = ModelRole(trainable=True, dtype="bfloat16", path="x")
    trained = graph({"train": Train(model="actor", loss=Loss({}))}, [], {"actor": role})
    work = Workload(512, 1, 512, 4096, 1024.0, max_tokens_per_microbatch=4608)
    asked = request(trained, "Qwen/Qwen3-235B-A22B", machine, workload=work)
    return replace(asked, constraints=Constraints(offload=False))


def everything(asked: PlanRequest) -> Iterator[tuple[Layout, float]]:
    """Layout and seconds of all ways to train on any mesh that fit, by every way to write its size as a product."""
    model = asked.model("train")
    for mesh in {DeviceMesh(0, mesh.n_devices) for mesh in family(asked.cluster).meshes}:
        sizes = [n for n in range(1, mesh.n_devices + 1) if mesh.n_devices % n == 0]
        for tp, pp, ep, sharding in product((1, 2, 4, 8), sizes, sizes, SHARDINGS):
            dp, rest = divmod(mesh.n_devices, tp * pp)
            if rest or pp > 32 or dp * tp % ep or model.experts % ep or (sharding == "fsdp" and dp == 1):
                continue
            if tp > model.kv_heads and tp % model.kv_heads:
                continue
            layout = Layout(mesh, dp=dp, tp=tp, pp=pp, ep=ep, sharding=sharding)
            for one in passes_for(asked, "train", CallOption(layout, 4608), asked.cluster):
                yield from ((layout, row.seconds) for row in options_of(asked, "train", one, asked.cluster))


@pytest.mark.slow
def test_the_search_finds_the_best_of_all_spreads_and_equals_brute_force() -> None:
    """The fastest way to train 235B on 64 H100s has its experts on more ranks than dp has."""
    asked = alone(cluster(nodes=8))
    plan = search(asked, EXACT)
    assert not validate(plan, asked)
    ways = list(everything(asked))
    assert plan.period_seconds == pytest.approx(min(seconds for _, seconds in ways), rel=1e-5)
    layout = plan.allocations["train"].layout
    assert layout.dp % layout.ep
    assert plan.period_seconds < 0.97 * min(seconds for one, seconds in ways if one.dp % one.ep == 0)


def test_megatrons_rule_spreads_experts_over_all_devices_of_the_fewest_stages_that_fit() -> None:
    """235B on 64 H100s does not fit without stages; each stage of two has its experts on all of its 32 devices."""
    asked = alone(cluster(nodes=8))
    prepared = problem_of(asked)
    everything = whole_problem(prepared)
    assert everything is not None
    rule = megatron(everything.prepared.problem, everything.shapes)
    assert rule is not None
    layout = option_of(everything.prepared, "train", rule.choices["train"]).candidate.layout
    assert (layout.tp, layout.ep) == (8, 64 // layout.pp) and layout.ep > layout.dp


# --- what tables leave out --------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[PlanRequest, str]:
    """A small mixture on one or two nodes, and one of the calls."""
    rng = random.Random(seed)
    algorithm = ppo() if rng.random() < 0.3 else grpo()
    nodes, devices = rng.choice([(2, 2), (1, 4), (2, 1), (2, 4)])
    work = Workload(rng.choice([16, 64]), rng.choice([1, 8]), 256, rng.choice([256, 2048]), rng.uniform(50, 250))
    asked = mixture(algorithm, cluster(rng.choice(["A100-40", "H100-SXM"]), devices, nodes), small(rng.choice([4, 8])))
    return replace(
        asked,
        workload=replace(work, staleness=rng.choice([0, 0, 1])),
        engine=replace(TORCH, transports=rng.choice([("device",), ("host",), ("device", "host")])),
        constraints=Constraints(memory_gb=rng.choice([None, rng.uniform(20, 40)]), offload=rng.random() < 0.7),
    ), rng.choice(asked.mesh_calls)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_of_mixtures_pruned_and_whole_tables_have_one_optimum(seed: int) -> None:
    asked, call = drawn(seed)
    few, all_of = (problem_of(asked, whole).problem for whole in ("", call))
    assert all(task.tables for task in few.tasks) == all(task.tables for task in all_of.tasks)
    if not all(task.tables for task in few.tasks):
        return
    found, best = (solve(problem, Limits(gap=1e-4, seconds=30.0)) for problem in (few, all_of))
    assert isinstance(found, Solution) == isinstance(best, Solution)
    if isinstance(found, Solution) and isinstance(best, Solution):
        assert best.bound <= found.period * (1 + 1e-9) and found.bound <= best.period * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_moves_from_one_layout_take_longer_than_from_another_by_what_is_said_at_most(seed: int) -> None:
    (asked, _), rng = drawn(seed), random.Random(seed)
    meshes = family(asked.cluster).meshes

    def place(call: str, mesh: DeviceMesh) -> Place:
        offered = candidates(asked, call, mesh, asked.cluster)
        rows = [row for one in offered for row in options_of(asked, call, one, asked.cluster)]
        return Place(mesh, 0, tuple(rng.sample(rows, min(len(rows), 40))))

    reads = asked.mesh_calls[0]
    trains = next(n for n in asked.mesh_calls[1:] if asked.graph.role(n) == asked.graph.role(reads))
    places = [there for mesh in meshes if (there := place(reads, mesh)).options]
    for mesh in meshes:
        here = place(trains, mesh)
        if not here.options:
            continue
        longer = longer_moves(asked, {reads: places}, here)
        for there in places:
            seconds = move_matrix(asked, reads, here, there)
            apart = seconds[:, None, :] - seconds[None, :, :]
            assert (apart.max(axis=2) <= longer.more[:, None] + longer.less[None, :] + 1e-9).all(), (mesh, there.mesh)
