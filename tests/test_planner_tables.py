"""Option tables and couplings: what the search is given is sound, complete and small."""

import random
import time

import msgspec
import numpy as np
import pytest

from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import Advantage, Function, Generate, ModelRole, Train
from realgraph.planner.costs.memory.memory import DType, communicators
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.options.calls import is_trained, microbatches_of, step_end_seconds
from realgraph.planner.options.choices import candidates
from realgraph.planner.options.couplings import free_floor, precedences
from realgraph.planner.options.footprints import copy_of, holding
from realgraph.planner.options.meshes import group_of
from realgraph.planner.options.moves import Place, longest_moves, move_matrix
from realgraph.planner.options.passes import schedule_fault
from realgraph.planner.options.pricing import options_of
from realgraph.planner.options.pruning import TableRows, kept_rows
from realgraph.planner.options.tables import problem_of
from realgraph.planner.plan.events import Dependency, EventGraph, event_graph, period
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.plan import Hashes, Plan, Transport
from realgraph.planner.plan.problem import Limits, OptionTable, Solution
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.cost_table import CostTable, PhaseFactor
from realgraph.planner.request.engine_support import TORCH
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.solve.solver import solve
from tests.planner_cases import MIXED, cluster, graph, grpo, ppo, request

replace = msgspec.structs.replace


def test_measured_costs_speak_of_their_own_kind_of_device_alone() -> None:
    """A table of the A100s alone makes their calls take twice as long, and leaves those of the H100s as they were."""
    asked = request(grpo(), "Qwen/Qwen3-1.7B", MIXED)
    measured = replace(asked, costs=CostTable(kind="A100-80", phases={"train": PhaseFactor(2.0, error=0.1)}))
    for first, factor in ((0, 1.0), (16, 2.0)):
        mesh, group = DeviceMesh(first, 8), MIXED.groups[group_of(MIXED, first)]
        found = [c for c in candidates(asked, "train", mesh, group) if list(options_of(asked, "train", c, group))]
        before, after = (next(options_of(each, "train", found[0], group)).seconds for each in (asked, measured))
        end = step_end_seconds(asked, "train", group)
        assert after - end == pytest.approx(factor * (before - end))


def test_measured_moves_speak_of_their_own_kind_of_device_alone() -> None:
    """Moves to A100s take twice as long, those from them to H100s as long as before; so do their bounds."""
    asked = request(grpo(), "Qwen/Qwen3-1.7B", MIXED)
    measured = replace(asked, costs=CostTable(kind="A100-80", phases={"reallocate": PhaseFactor(2.0, error=0.1)}))

    def place(call: str, first: int) -> Place:
        mesh, at = DeviceMesh(first, 8), group_of(MIXED, first)
        group = MIXED.groups[at]
        found = (row for c in candidates(asked, call, mesh, group) for row in options_of(asked, call, c, group))
        return Place(mesh, at, (next(found),))

    for first, other, factor in ((0, 16, 1.0), (16, 0, 2.0)):
        there, source = place("rollout", first), place("train", other)
        for many in (
            lambda each, there=there, source=source: move_matrix(each, "rollout", source, there),
            lambda each, there=there: longest_moves(each, "rollout", there),
        ):
            before, after = many(asked), many(measured)
            assert (before > 0).all() and after == pytest.approx(factor * before)


@pytest.mark.slow
@pytest.mark.parametrize("transports", [("device",), ("host",), ("device", "host")])
@pytest.mark.parametrize("machine", [cluster(), cluster("RTX-A6000", nodes=2), MIXED], ids=["H100", "PCIe", "mixed"])
def test_no_move_takes_longer_than_its_bound_whatever_transports_there_are(
    machine: Cluster, transports: tuple[Transport, ...]
) -> None:
    asked = request(grpo(), "Qwen/Qwen3-1.7B", machine)
    asked = replace(asked, engine=replace(TORCH, transports=transports))

    def place(call: str, mesh: DeviceMesh) -> Place:
        at = group_of(machine, mesh.first)
        group = machine.groups[at]
        offered = candidates(asked, call, mesh, group)
        return Place(mesh, at, tuple(row for one in offered for row in options_of(asked, call, one, group)))

    meshes = (DeviceMesh(0, 1), DeviceMesh(4, 2), DeviceMesh(0, 8), DeviceMesh(8, 4), DeviceMesh(0, 16))
    targets = [mesh for mesh in meshes if mesh.devices.stop <= machine.n_devices]
    for target in targets:
        there = place("rollout", target)
        most = longest_moves(asked, "rollout", there)
        for source in targets[1:]:
            here = place("train", source)
            assert here.options and there.options
            assert (move_matrix(asked, "rollout", here, there) <= most[None, :] * (1 + 1e-9)).all()


@pytest.mark.parametrize(("dtype", "widest"), [("bfloat16", 8), ("float32", 16)])
def test_a_replica_spans_nodes_where_none_holds_its_weights(dtype: DType, widest: int) -> None:
    """70B parameters are 141 GB in bf16 and 282 GB in float32; a node of eight A100-40 has 343 GB, not all for them."""
    asked = request(grpo(dtype), "meta-llama/Llama-3.1-70B", cluster("A100-40", nodes=4))
    offered = candidates(asked, "rollout", DeviceMesh(0, 32), asked.cluster)
    assert max(candidate.layout.tp for candidate in offered) == widest


def test_gradients_are_there_only_while_a_call_trains() -> None:
    """Between its calls a role has weights and optimizer states, on the devices or in host memory."""
    asked = request(grpo(), "Qwen/Qwen3-1.7B", cluster())
    for candidate in candidates(asked, "train", DeviceMesh(0, 4), asked.cluster):
        held = holding(asked, "train", candidate, asked.cluster)
        states = copy_of(asked, "train", candidate.layout, asked.cluster)
        waits = held.host if candidate.residency == "offloaded" else held.resident.total
        assert waits == states.weights + states.optimizer
        assert held.active.buckets >= communicators(candidate.layout).total
        assert held.resident.gradients == 0 < states.gradients <= held.active.gradients


def test_context_parallel_ranks_hold_their_part_of_a_long_sample() -> None:
    """Each of 8 ranks has 8,192 of 65,536 tokens: that is what cp is for."""
    long = request(grpo(), "Qwen/Qwen3-8B", cluster(nodes=2), workload=Workload(64, 8, 1024, 64512, 16e3))
    mesh, found = DeviceMesh(0, 16), dict[int, int]()
    for candidate in candidates(long, "train", mesh, long.cluster):
        if (candidate.layout.tp, candidate.layout.pp, candidate.layout.sharding) == (2, 1, "replicated"):
            active = holding(long, "train", candidate, long.cluster).active
            assert candidate.tokens >= 65536 // candidate.layout.cp
            rows = active.total - active.gradients
            found[candidate.layout.cp] = min(found.get(candidate.layout.cp, rows), rows)
    assert sorted(found) == [1, 2, 4, 8]
    for cp in (2, 4, 8):
        assert found[cp] < 0.6 * found[cp // 2]


# --- pruning ----------------------------------------------------------------------------------------------------------


def random_rows(rng: random.Random) -> TableRows:
    n = rng.randint(1, 40)
    seconds = np.array([rng.choice([1.0, 2.0, 3.0, rng.uniform(1, 4)]) for _ in range(n)])
    active = np.array([rng.randint(0, 6) for _ in range(n)])
    shared = np.array([rng.randint(0, int(a)) for a in active])
    ints = [np.array([rng.randint(0, 4) for _ in range(n)]) for _ in range(3)]
    layouts = np.array([rng.randint(0, 3) for _ in range(n)])
    table = OptionTable(seconds, seconds + ints[2] / 2, ints[0], active, shared, ints[1], layouts)
    if rng.random() < 0.3:
        return TableRows(replace(table, shared=0 * shared))
    slack = np.array([rng.choice([0.0, 0.5]) for _ in range(n)])
    edge = np.array([rng.choice([0.0, 0.3]) for _ in range(n)])
    bonus, beside = (np.array([rng.choice([0, 2, 5]) for _ in range(n)]) for _ in range(2))
    return TableRows(table, slack, edge, bonus, beside)


def beats(rows: TableRows, a: int, b: int) -> bool:
    """True where row a may stand for row b, by the definition, one number after another."""
    t, same = rows.table, rows.slack is None or rows.table.layout[a] == rows.table.layout[b]
    if rows.slack is None:
        slack, bonus, beside, alone_b = 0.0, 0, 99, t.active[b]
    else:
        assert rows.bonus is not None
        assert rows.edge is not None
        assert rows.beside is not None
        beside = 99 if same else rows.beside[b]
        slack = 0.0 if same else rows.slack[a] + rows.edge[b]
        bonus = 0 if same else rows.bonus[b]
        alone_b = t.active[b] if same else t.active[b] - t.shared[b]
    return bool(
        t.seconds[a] + slack <= t.seconds[b]
        and t.latency[a] + slack <= t.latency[b]
        and t.resident[a] <= t.resident[b]
        and (t.resident[a] + bonus <= t.resident[b] or t.resident[a] + beside <= t.resident[b] + t.active[b])
        and t.host[a] <= t.host[b]
        and t.active[a] <= alone_b
        and (not same or rows.slack is None or t.active[a] - t.shared[a] <= t.active[b] - t.shared[b])
    )


@pytest.mark.parametrize("seed", range(150))
def test_of_every_row_a_kept_one_is_as_good_and_no_kept_one_is_beaten_by_an_earlier_one(seed: int) -> None:
    rows = random_rows(random.Random(seed))
    kept = kept_rows(rows)
    for b in range(len(rows.table)):
        assert b in kept or any(beats(rows, a, b) for a in kept)
    assert not any(beats(rows, a, b) for i, b in enumerate(kept) for a in kept[:i])


# --- candidates and tables --------------------------------------------------------------------------------------------

EXACT = Limits(gap=1e-4, seconds=20.0)
WORK = Workload(256, 2, 512, 2048, 600.0)
PPO_16 = request(ppo(), "meta-llama/Llama-3.1-8B", cluster(nodes=2), workload=WORK)


@pytest.mark.parametrize("n_devices", [1, 4, 8, 16])
def test_candidates_use_the_whole_mesh_once(n_devices: int) -> None:
    asked = PPO_16
    for call in asked.mesh_calls:
        found = list(candidates(asked, call, DeviceMesh(0, n_devices), asked.cluster))
        assert found
        assert len(set(found)) == len(found)
        for candidate in found:
            layout = candidate.layout
            assert layout.dp * layout.tp * layout.pp * layout.cp == n_devices
            assert layout.dp <= asked.workload.n_samples
            assert layout.cp == 1 or not isinstance(asked.graph.calls[call], Generate)
        waits = any(candidate.residency == "offloaded" for candidate in found)
        assert waits == (isinstance(asked.graph.calls[call], Train) or not is_trained(asked, asked.graph.role(call)))


def test_a_forbidden_or_pinned_choice_is_left_out_or_alone() -> None:
    mesh, machine = DeviceMesh(0, 8), PPO_16.cluster
    every = set(candidates(PPO_16, "actor_train", mesh, machine))
    pinned = replace(PPO_16, pins={"actor_train": Pin(tp=4, recompute="full", residency="resident")})
    left = set(candidates(pinned, "actor_train", mesh, machine))
    assert left == {c for c in every if c.layout.tp == 4 and c.recompute == "full" and c.residency == "resident"}
    for pin in (
        Pin(tp=8),
        Pin(sharding="fsdp"),
        Pin(recompute="none"),
        Pin(recompute="selective"),
        Pin(schedule="interleaved", chunks=8),
        Pin(devices=8, pp=2),
        Pin(residency="offloaded"),
    ):
        barred = replace(PPO_16, constraints=Constraints(forbid={"actor_train": (pin,)}))
        kept = set(candidates(barred, "actor_train", mesh, machine))
        assert kept < every
        assert kept | set(candidates(replace(PPO_16, pins={"actor_train": pin}), "actor_train", mesh, machine)) == every


def test_every_schedule_is_offered_with_every_recomputation() -> None:
    found = {(c.passes, c.layout.pp > 1) for c in candidates(PPO_16, "actor_train", DeviceMesh(0, 8), PPO_16.cluster)}
    assert {((way, "1f1b", 1), piped) for way in ("none", "selective", "full") for piped in (True, False)} <= found
    piped = {(schedule, recompute) for (recompute, schedule, _), stages in found if stages}
    assert piped == {(schedule, way) for schedule in ("1f1b", "interleaved") for way in ("none", "selective", "full")}
    assert {schedule for (_, schedule, _), stages in found if not stages} == {"1f1b"}


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-32B-Instruct", "meta-llama/Llama-3.1-8B"])
def test_interleaved_stages_have_whole_turns_of_samples_and_layers_for_each_chunk(name: str) -> None:
    asked = request(ppo(), name, cluster(nodes=4), workload=WORK)
    train, model = asked.graph.calls["actor_train"], asked.model("actor_train")
    assert isinstance(train, Train)
    for size in (8, 16, 32):
        for candidate in candidates(asked, "actor_train", DeviceMesh(0, size), asked.cluster):
            layout = candidate.layout
            assert schedule_fault(candidate, model, "lm") == ""
            if candidate.schedule == "interleaved":
                count = microbatches_of(asked, "actor_train", candidate, asked.cluster)
                assert count % layout.pp == 0
                assert count * layout.dp * train.minibatches <= WORK.n_samples


def test_tables_hold_what_fits_and_prices_rise_with_nothing_else() -> None:
    prepared = problem_of(PPO_16)
    problem = prepared.problem
    for task in problem.tasks:
        assert task.tables
        for mesh, number in task.tables.items():
            table, options = problem.tables[number], prepared.options[number]
            assert len(table) == len(options)
            for i, option in enumerate(options):
                assert option.candidate.layout.mesh.n_devices == problem.meshes[mesh].n_devices
                assert 0 < table.seconds[i] <= table.latency[i]
                needed = table.resident[i] + table.active[i] - table.shared[i]
                assert 0 < needed <= problem.memory[problem.meshes[mesh].first]
    numbers: dict[object, int] = {}
    for table, options in zip(problem.tables, prepared.options, strict=True):
        for i, option in enumerate(options):
            layout = replace(option.candidate.layout, mesh=DeviceMesh(0, 1))
            key = (layout, option.candidate.residency == "offloaded")
            assert numbers.setdefault(key, int(table.layout[i])) == table.layout[i]
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.filterwarnings("error")
def test_a_role_that_nobody_reads_has_tables_too() -> None:
    """Supervised fine-tuning is one train call, and nothing else."""
    lone = graph({"train": Train(model="actor", loss=Loss({}))}, [], {"actor": ModelRole(trainable=True, path="x")})
    prepared = problem_of(request(lone, machine=cluster(nodes=2), workload=WORK))
    assert prepared.problem.moves == ()
    assert prepared.problem.tasks[0].tables


def test_the_whole_table_of_a_call_can_be_asked_for() -> None:
    pruned, whole = problem_of(PPO_16), problem_of(PPO_16, whole="actor_train")
    for a, b in zip(pruned.problem.tasks, whole.problem.tasks, strict=True):
        few = sum(len(pruned.problem.tables[t]) for t in set(a.tables.values()))
        many = sum(len(whole.problem.tables[t]) for t in set(b.tables.values()))
        assert few < many if a.name == "actor_train" else few == many


def test_a_mixed_cluster_has_tables_of_each_kind() -> None:
    prepared = problem_of(request(grpo(), "Qwen/Qwen3-1.7B", MIXED, workload=WORK))
    rollout = prepared.problem.tasks[0]
    by_mesh = {prepared.problem.meshes[m]: prepared.problem.tables[t] for m, t in rollout.tables.items()}
    fast, slow = by_mesh[DeviceMesh(0, 8)], by_mesh[DeviceMesh(16, 8)]
    assert fast.seconds.min() < slow.seconds.min()
    assert len(prepared.problem.host_memory) * prepared.problem.devices_per_node == MIXED.n_devices
    assert prepared.problem.memory[0] != prepared.problem.memory[-1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_more_in_flight_takes_longer_and_holds_the_mesh_less(staleness: int) -> None:
    asked = replace(PPO_16, workload=replace(WORK, staleness=staleness))
    prepared = problem_of(asked)
    task = next(task for task in prepared.problem.tasks if task.name == "generate")
    tables = [prepared.problem.tables[number] for number in set(task.tables.values())]
    later = sum(int((table.latency > table.seconds).sum()) for table in tables)
    assert (later > 0) == (staleness > 0)


# --- couplings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("staleness", [0, 1])
def test_free_calls_folded_into_delays_leave_the_period_as_it_is(seed: int, staleness: int) -> None:
    rng = random.Random(seed)
    asked: PlanRequest = request(ppo() if seed % 2 else grpo(), workload=replace(WORK, staleness=staleness))
    calls = asked.graph.calls
    free = {n: rng.choice([0.0, rng.uniform(0, 40)]) for n, c in calls.items() if isinstance(c, Function | Advantage)}
    held = {name: rng.uniform(1, 30) for name in asked.mesh_calls}
    alone = Plan({}, {}, Hashes("", "", ""), staleness)
    whole = event_graph(asked.graph, alone, free | held)
    folded = {Dependency(p.source, p.target, p.distance, p.delay) for p in precedences(asked, free)} | {
        Dependency(name, name, 1) for name in held
    }
    found = period(EventGraph(held, tuple(sorted(folded)))).seconds
    assert max(found, free_floor(asked, free)) == pytest.approx(period(whole).seconds, rel=1e-9)


@pytest.mark.slow
def test_a_thousand_devices_take_a_second() -> None:
    asked = request(
        ppo(),
        "meta-llama/Llama-3.1-70B",
        cluster(nodes=128),
        workload=Workload(512, 1, 512, 4096, 1024.0),
    )
    begun = time.process_time()
    prepared = problem_of(asked)
    assert time.process_time() - begun < 5.0  # half a second on an idle machine
    assert all(task.tables for task in prepared.problem.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("call", PPO_16.mesh_calls)
def test_what_is_pruned_is_not_missed(call: str) -> None:
    """The search with every option of a call finds nothing better than without those that were left out."""
    for memory_gb in (None, 40.0):
        models = dict.fromkeys(PPO_16.models, request(grpo()).model("train"))
        constraints = Constraints(memory_gb=memory_gb)
        asked = replace(PPO_16, cluster=cluster(), models=models, constraints=constraints)
        few, all_of = (solve(problem_of(asked, whole).problem, EXACT) for whole in ("", call))
        assert isinstance(few, Solution)
        assert isinstance(all_of, Solution)
        assert few.period <= all_of.period * (1 + 2e-4)
        assert few.bound <= all_of.period * (1 + 1e-9)


def drawn(seed: int) -> tuple[PlanRequest, str]:
    """A small random request, and one of its calls."""
    rng = random.Random(seed)
    algorithm = ppo() if rng.random() < 0.4 else grpo()
    work = Workload(rng.choice([16, 64]), rng.choice([1, 8]), 256, rng.choice([256, 2048]), rng.uniform(50, 250))
    asked = replace(
        request(algorithm, "Qwen/Qwen3-0.6B", cluster(rng.choice(["A100-40", "H100-SXM"]), rng.choice([2, 4, 8]))),
        workload=replace(work, staleness=rng.choice([0, 0, 1])),
        engine=replace(TORCH, transports=rng.choice([("device",), ("device", "host")])),
        models={name: request(grpo(), rng.choice(SMALL_MODELS)).model("train") for name in algorithm.models},
        constraints=Constraints(memory_gb=rng.choice([None, rng.uniform(12, 40)]), offload=rng.random() < 0.7),
    )
    return asked, rng.choice(asked.mesh_calls)


SMALL_MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_of_random_requests_pruned_and_whole_tables_have_one_optimum(block: int) -> None:
    planned = 0
    for seed in range(4 * block, 4 * block + 4):
        asked, call = drawn(seed)
        few, all_of = (problem_of(asked, whole).problem for whole in ("", call))
        if not all(task.tables for task in all_of.tasks):
            assert not all(task.tables for task in few.tasks), seed
            continue
        found, best = solve(few, EXACT), solve(all_of, EXACT)
        assert isinstance(found, Solution) == isinstance(best, Solution), seed
        if isinstance(found, Solution) and isinstance(best, Solution):
            assert found.stopped == best.stopped == "proven", seed
            assert best.bound <= found.period * (1 + 1e-9) and found.bound <= best.period * (1 + 1e-9), seed
            planned += 1
    assert planned >= 2
