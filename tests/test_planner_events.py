"""The timed event graph against simulation and against all circuits one by one."""

import math
import random
from collections.abc import Mapping

import msgspec
import networkx as nx
import pytest

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.facts import Facts
from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Generate, Inference
from realgraph.planner.plan.events import (
    Dependency,
    EventGraph,
    empty_circuit,
    event_graph,
    graph_edges,
    liveness_graph,
    period,
    show_circuit,
)
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.option import CallOption
from realgraph.planner.plan.plan import Allocation, Hashes, Plan, Turn
from realgraph.planner.plan.residency import dropped_copies, shares_trained_copy
from tests.planner_cases import ppo
from tests.strategies import DELETE, change, judge_tree, spec_of, where

PPO_SECONDS = {"generate": 30.0, "ref": 5.0, "values": 4.0, "actor_train": 25.0, "critic_train": 24.0}
STEPS, CYCLE = 1300, 420  # simulated steps; a multiple of every circuit's distance in the graphs drawn here


def random_events(rng: random.Random, live: bool) -> EventGraph:
    """2 to 5 nodes under random dependencies. Live: distances by potentials, so that each circuit has 1 or more."""
    names = [f"c{i}" for i in range(rng.randint(2, 5))]
    seconds = {name: float(rng.randint(1, 4)) for name in names}
    shift = {name: rng.randint(-1, 1) for name in names} if live else dict.fromkeys(names, 0)
    edges = {Dependency(name, name, 1) for name in names}
    for _ in range(rng.randint(2, 9)):
        source, target = rng.sample(names, 2)
        later = names.index(source) >= names.index(target)
        distance = int(later) + rng.choice([0, 0, 0, 1]) if live else rng.choice([-1, 0, 0, 1, 1, 2])
        edges.add(Dependency(source, target, distance + shift[target] - shift[source]))
    return EventGraph(seconds, tuple(sorted(edges)))


def simulate(events: EventGraph, steps: int) -> dict[str, list[float]] | None:
    """End times of every call of every step, each as soon as what it waits for has ended; None where that is never."""
    horizon = steps + len(events.seconds) * max(abs(d.distance) for d in events.dependencies) + 1
    waits: dict[str, list[Dependency]] = {name: [] for name in events.seconds}
    for dependency in events.dependencies:
        waits[dependency.target].append(dependency)
    ends: dict[tuple[str, int], float] = {}
    for name in events.seconds:
        for step in range(steps):
            stack, active = [(name, step)], set()
            while stack:
                at = stack[-1]
                if at in ends:
                    stack.pop()
                    continue
                needs = [(d.source, at[1] - d.distance) for d in waits[at[0]] if at[1] - d.distance >= 0]
                if any(need in active or need[1] > horizon for need in needs if need not in ends) or at in needs:
                    return None
                missing = [need for need in needs if need not in ends]
                if missing:
                    active.add(at)
                    stack.append(missing[0])
                    continue
                active.discard(at)
                ends[at] = max((ends[need] for need in needs), default=0.0) + events.seconds[at[0]]
                stack.pop()
    return {name: [ends[name, step] for step in range(steps)] for name in events.seconds}


def circuits(events: EventGraph) -> list[tuple[float, int]]:
    """(seconds, distance) of every simple circuit; of parallel edges the least distance counts."""
    net = nx.DiGraph()
    for d in sorted(events.dependencies, key=lambda d: -d.distance):
        net.add_edge(d.source, d.target, distance=d.distance)
    found = []
    for names in nx.simple_cycles(net):
        pairs = zip(names, names[1:] + names[:1], strict=True)
        found.append((sum(events.seconds[n] for n in names), sum(net.edges[p]["distance"] for p in pairs)))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_period_of_a_live_graph_is_what_a_simulation_settles_to(seed: int) -> None:
    events = random_events(random.Random(seed), live=True)
    assert empty_circuit(events) is None
    ends = simulate(events, STEPS)
    assert ends is not None
    rate = max((times[-1] - times[-1 - CYCLE]) / CYCLE for times in ends.values())
    found = period(events)
    assert math.isclose(found.seconds, rate, rel_tol=1e-6)
    assert math.isclose(found.seconds, max(seconds / distance for seconds, distance in circuits(events)), rel_tol=1e-9)


@pytest.mark.parametrize("seed", range(300))
def test_a_graph_deadlocks_iff_a_circuit_is_empty(seed: int) -> None:
    events = random_events(random.Random(seed), live=seed % 2 == 0)
    stuck = empty_circuit(events)
    assert (stuck is None) == (simulate(events, 12) is not None)
    assert (stuck is None) == all(distance > 0 for _, distance in circuits(events))
    if stuck is not None:
        distance = {(d.source, d.target): d.distance for d in sorted(events.dependencies, key=lambda d: -d.distance)}
        assert sum(distance[pair] for pair in zip(stuck, stuck[1:] + stuck[:1], strict=True)) <= 0
        with pytest.raises(ValueError, match="distance below 1"):
            period(events)


@pytest.mark.parametrize("seed", range(40))
def test_the_critical_circuit_has_the_ratio_of_the_period(seed: int) -> None:
    rng = random.Random(seed)
    events = random_events(rng, live=True)
    events = msgspec.structs.replace(events, seconds={name: rng.uniform(0.01, 50) for name in events.seconds})
    found = period(events)
    distance = {(d.source, d.target): d.distance for d in sorted(events.dependencies, key=lambda d: -d.distance)}
    pairs = list(zip(found.circuit, found.circuit[1:] + found.circuit[:1], strict=True))
    ratio = sum(events.seconds[name] for name in found.circuit) / sum(distance[pair] for pair in pairs)
    assert math.isclose(ratio, found.seconds, rel_tol=1e-9)
    assert all(seconds <= found.seconds * distance * (1 + 1e-9) for seconds, distance in circuits(events))


def ppo_plan(meshes: dict[str, DeviceMesh], orders: Mapping[int, tuple[Turn, ...]], staleness: int = 0) -> Plan:
    allocations = {
        name: Allocation(Layout(meshes[name], dp=meshes[name].n_devices), 1024, seconds=seconds)
        for name, seconds in PPO_SECONDS.items()
    }
    return Plan(allocations, dict(orders), Hashes("", "", ""), staleness)


def ppo_period(plan: Plan, staleness: int = 0) -> float:
    at = msgspec.structs.replace(plan, staleness=staleness)
    return period(event_graph(ppo(), at, {"reward": 3.0})).seconds


def test_ppo_on_one_mesh_takes_the_sum_of_its_calls_and_floating_critic_training_hides_it() -> None:
    both = DeviceMesh(0, 2)
    turns = tuple(Turn(name) for name in PPO_SECONDS)
    plan = ppo_plan(dict.fromkeys(PPO_SECONDS, both), {0: turns, 1: turns})
    assert ppo_period(plan) == 30 + 5 + 4 + 25 + 24  # the reward, 3 s, runs beside the reference
    # the critic trains on device 1 while device 0 generates the next step
    meshes = dict.fromkeys(PPO_SECONDS, both) | {"generate": DeviceMesh(0, 1), "critic_train": DeviceMesh(1, 1)}
    shared = (Turn("ref"), Turn("values"), Turn("actor_train"))
    orders = {0: (Turn("generate"), *shared), 1: (Turn("critic_train", -1), *shared)}
    assert ppo_period(ppo_plan(meshes, orders)) == 30 + 5 + 4 + 25


@pytest.mark.parametrize(("staleness", "expected"), [(0, 60), (1, 30), (4, 30)])
def test_staleness_is_distance_between_training_and_generation(staleness: int, expected: float) -> None:
    meshes = {name: DeviceMesh(i, 1) for i, name in enumerate(PPO_SECONDS)}
    orders = {i: (Turn(name),) for i, name in enumerate(PPO_SECONDS)}
    assert ppo_period(ppo_plan(meshes, orders), staleness) == expected


def test_a_reallocation_delays_the_copy_that_it_refreshes() -> None:
    meshes = {name: DeviceMesh(i, 1) for i, name in enumerate(PPO_SECONDS)}
    orders = {i: (Turn(name),) for i, name in enumerate(PPO_SECONDS)}
    plan = ppo_plan(meshes, orders)
    events = event_graph(ppo(), plan, {"reward": 3.0, "reallocate:generate": 2.0})
    assert period(events).seconds == 60 + 2
    assert "reallocate:generate" in period(events).circuit


def test_an_order_against_the_data_is_an_empty_circuit_and_is_named() -> None:
    both = DeviceMesh(0, 1)
    turns = tuple(Turn(name) for name in ("ref", "values", "actor_train", "critic_train", "generate"))
    algorithm: Graph = ppo()
    stuck = empty_circuit(event_graph(algorithm, ppo_plan(dict.fromkeys(PPO_SECONDS, both), {0: turns}), {}))
    assert stuck is not None
    assert show_circuit(stuck).startswith("generate -> ")
    assert show_circuit(stuck).endswith(" -> generate")


def test_what_reads_late_outputs_waits_for_them_and_the_mesh_does_not() -> None:
    """A generate session that streams holds its mesh for 30 s, and its samples are complete after 50 s."""
    meshes = {name: DeviceMesh(i, 1) for i, name in enumerate(PPO_SECONDS)}
    orders = {i: (Turn(name),) for i, name in enumerate(PPO_SECONDS)}
    plan = ppo_plan(meshes, orders)
    late = msgspec.structs.replace(plan.allocations["generate"], latency_seconds=50.0)
    streaming = msgspec.structs.replace(plan, allocations={**plan.allocations, "generate": late})
    assert ppo_period(streaming) == 50 + 5 + 25
    assert ppo_period(streaming, 1) == 40  # half of the same circuit, of distance 2
    assert ppo_period(streaming, 2) == 30  # the mesh itself
    after = {**orders, 0: (Turn("generate"), Turn("ref", -1))}
    del after[1]
    shared = msgspec.structs.replace(streaming.allocations["ref"], layout=Layout(DeviceMesh(0, 1)))
    both = msgspec.structs.replace(streaming, allocations={**streaming.allocations, "ref": shared}, orders=after)
    assert ppo_period(both, 4) == 30 + 5  # a session begins before the last one's samples are scored


def test_a_reallocation_holds_the_devices_whose_orders_name_it() -> None:
    """The copy that generates is refreshed in 2 s; named in the trainer's order too, it takes them from the trainer."""
    meshes = {name: DeviceMesh(i, 1) for i, name in enumerate(PPO_SECONDS)}
    orders = {i: (Turn(name),) for i, name in enumerate(PPO_SECONDS)}
    implied = msgspec.structs.replace(ppo_plan(meshes, orders), reallocation_seconds={"generate": 2.0})

    def named(seconds: float, ahead: int) -> Plan:
        move = Turn("reallocate:generate", ahead)
        taken = {**orders, 0: (move, Turn("generate", ahead)), 3: (move, Turn("actor_train"))}
        return msgspec.structs.replace(implied, orders=taken, reallocation_seconds={"generate": seconds})

    for staleness, expected in ((0, 62), (1, 32), (4, 32)):
        assert ppo_period(implied, staleness) == expected
        assert ppo_period(named(2.0, staleness), staleness) == expected
    slow = named(20.0, 4)
    assert ppo_period(slow, 4) == 50  # generation and its reallocation share a device; training and it another: 45
    ordered = msgspec.structs.replace(slow, orders={**slow.orders, 0: (Turn("generate", 4),)})
    assert ppo_period(ordered, 4) == 45


def test_generation_reads_no_sharded_copy_and_inference_does() -> None:
    whole = CallOption(Layout(DeviceMesh(0, 8), dp=8))
    sharded = CallOption(Layout(DeviceMesh(0, 8), dp=8, sharding="fsdp"))
    generate, inference = Generate(model="actor"), Inference(model="actor", output="logprobs", writes=("l",))
    assert shares_trained_copy(generate, whole, whole) and shares_trained_copy(inference, sharded, sharded)
    assert not shares_trained_copy(generate, sharded, sharded)
    assert not shares_trained_copy(inference, whole, sharded)
    assert not shares_trained_copy(inference, whole, msgspec.structs.replace(whole, residency="offloaded"))


def test_only_copies_on_shared_devices_are_given_up_and_never_those_of_a_stream() -> None:
    graph, both, first, last = ppo(), DeviceMesh(0, 2), DeviceMesh(0, 1), DeviceMesh(1, 1)

    def dropped(staleness: int, **meshes: DeviceMesh) -> dict[str, tuple[str, ...]]:
        plan = ppo_plan(dict.fromkeys(PPO_SECONDS, both) | meshes, {})
        return dropped_copies(graph, plan.allocations, staleness)

    assert dropped(0) == dropped(1) == {}  # all read the trained copies in place
    assert dropped(0, generate=first, values=last) == {"generate": ("generate",), "values": ("values",)}
    assert dropped(1, generate=first, values=last) == {"values": ("values",)}
    others = dict.fromkeys(("values", "ref", "actor_train", "critic_train"), last)
    assert dropped(0, **others, generate=first) == {}  # nothing else comes to its devices


def streamed(ahead: int) -> Plan:
    """Generation and the reference on device 0, the reference and all that trains on device 1."""
    own, both = DeviceMesh(1, 1), DeviceMesh(0, 2)
    meshes = dict.fromkeys(PPO_SECONDS, own) | {"generate": DeviceMesh(0, 1), "ref": both}
    weights = Turn("reallocate:generate")
    orders = {
        0: (weights, Turn("generate"), Turn("ref")),
        1: (weights, Turn("critic_train", -1), Turn("ref"), Turn("values"), Turn("actor_train")),
    }
    plan = ppo_plan(meshes, orders, staleness=2)
    generate = msgspec.structs.replace(plan.allocations["generate"], latency_seconds=10.0, ahead=ahead)
    return msgspec.structs.replace(
        plan, allocations={**plan.allocations, "generate": generate}, reallocation_seconds={"generate": 2.0}
    )


@pytest.mark.parametrize("seconds", [30.0, 70.0])
def test_a_stream_shares_its_devices_in_any_order_and_new_weights_do_not_wait(seconds: float) -> None:
    plan = streamed(ahead=1)
    generate = msgspec.structs.replace(plan.allocations["generate"], seconds=seconds)
    plan = msgspec.structs.replace(plan, allocations={**plan.allocations, "generate": generate})
    found = period(event_graph(ppo(), plan, {}, keeps_turns=False))
    trained = 5 + 4 + 25 + 2 + 24  # of device 1, the arrival of new weights between both train calls
    assert found.seconds == max(trained, seconds + 5 + 2)
    if seconds > trained:
        assert found.circuit == ("generate", "ref", "reallocate:generate")


def test_how_much_a_stream_has_in_flight_blocks_no_order() -> None:
    assert empty_circuit(liveness_graph(ppo(), streamed(ahead=2))) is None
    against = streamed(ahead=2)
    turns = (Turn("ref"), Turn("generate"))
    against = msgspec.structs.replace(against, orders={**against.orders, 0: turns})
    assert empty_circuit(liveness_graph(ppo(), against)) is not None


def test_samples_of_a_step_begin_when_later_calls_have_made_theirs_of_the_step_before() -> None:
    """Also where nothing is trained, so that no weights say so."""
    away = [f"calls.{name}" for name in ("reward", "baseline", "advantage", "train")]
    frozen = change(judge_tree(), {**dict.fromkeys(away, DELETE), "models.actor.trainable": False})
    graph = compile_graph(spec_of(frozen), where, Facts())
    for staleness in (0, 1, 3):
        edges = set(graph_edges(graph, staleness))
        assert {("judge", "rollout", 1 + staleness), ("greedy", "rollout", 1 + staleness)} <= edges
