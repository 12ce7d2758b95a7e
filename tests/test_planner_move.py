"""Seconds of moving weights, states and samples: against a slow count of bytes, and against common sense."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.move import (
    BUCKET_BYTES,
    BUCKET_SECONDS,
    copies_of,
    fastest_transports,
    move_seconds,
    offload_seconds,
    reallocation_seconds,
    transfer_seconds,
)
from realgraph.planner.costs.memory import memory
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.devices import device_kind
from realgraph.planner.plan.axes import coordinates_of
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import TRANSPORTS, Transport
from tests.planner_cases import cluster, known

BF16 = ModelRole(dtype="bfloat16")
SIZES = st.sampled_from([1, 2, 4, 8, 16, 32])


def at(layout: Layout, name: str = "Qwen/Qwen3-8B", nodes: int = 4) -> Setting:
    return Setting(known(name), BF16, layout, cluster("H100-SXM", 8, nodes))


def layout(first: int, n: int, tp: int = 1, pp: int = 1, sharding: str = "replicated") -> Layout:
    return Layout(DeviceMesh(first, n), dp=n // tp // pp, tp=tp, pp=pp, sharding=sharding)  # type: ignore[arg-type]


def seconds(source: Layout, target: Layout, name: str = "Qwen/Qwen3-8B") -> float:
    return float(move_seconds(copies_of(at(source, name), [source]), copies_of(at(target, name), [target]))[0, 0])


def device_bytes(setting: Setting, layout: Layout, serves: bool = True) -> float:
    return float(copies_of(setting, [layout], serves=serves).device_bytes[0])


def slices(one: Layout) -> dict[int, set[tuple[int, int]]]:
    """Pieces that each device holds of a model cut into 8 x 8 over (pp, tp)."""
    held: dict[int, set[tuple[int, int]]] = {}
    for device in one.mesh.devices:
        at = coordinates_of(one, device)
        stages = range(8 * at.pp // one.pp, 8 * (at.pp + 1) // one.pp)
        parts = range(8 * at.tp // one.tp, 8 * (at.tp + 1) // one.tp)
        held[device] = {(stage, part) for stage in stages for part in parts}
    return held


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    n = draw(SIZES)
    first = draw(st.sampled_from(range(0, 32, n)))
    tp = draw(st.sampled_from([k for k in (1, 2, 4, 8) if k <= n]))
    pp = draw(st.sampled_from([k for k in (1, 2, 4, 8) if k * tp <= n]))
    return layout(first, n, tp, pp)


@pytest.mark.slow
@settings(max_examples=200)
@given(layouts(), layouts())
def test_no_move_is_faster_than_its_bytes_and_slower_than_all_of_them_from_elsewhere(
    one: Layout, other: Layout
) -> None:
    """The oracle counts pieces: what a node and a device lack, and what passes their NICs and links at least."""
    point = at(other)
    whole = 2.0 * point.model.n_params()
    nic, link = point.cluster.nic_bytes_per_s * point.costs.nic, point.cluster.link_bytes_per_s * point.costs.link
    have, need = slices(one), slices(other)
    least = 0.0
    for node in {device // 8 for device in need}:
        wanted = set().union(*(need[device] for device in need if device // 8 == node))
        there = set().union(*(have[device] for device in have if device // 8 == node))
        cards = sum(device // 8 == node for device in need)
        senders = min(cards, one.mesh.n_devices)
        least = max(least, whole * len(wanted - there) / 64 / nic / senders)
    lacking = max(len(need[device] - have.get(device, set())) for device in need)
    least = max(least, whole * lacking / 64 / link)
    found = seconds(one, other)
    assert found >= least * (1 - 1e-9)
    held = device_bytes(point, other)
    most = max(
        min(whole, held * min(8, other.mesh.n_devices)) / min(8, one.mesh.n_devices, other.mesh.n_devices) / nic,
        held / link,
    )
    assert found <= most + held / BUCKET_BYTES * BUCKET_SECONDS + 0.01
    assert (found > 0) == (lacking > 0)


def test_a_copy_in_place_costs_nothing() -> None:
    assert seconds(layout(0, 8, 2), layout(0, 8, 2)) == 0
    assert seconds(layout(0, 8), layout(0, 4)) == 0  # whole copies lie there already
    assert seconds(layout(0, 8, 8), layout(0, 8, 4)) > 0
    assert seconds(layout(0, 8, 2), layout(0, 8, 2, 4)) == 0  # each device has its stage's layers among all layers
    assert seconds(layout(0, 8, 2, 2), layout(0, 4, 2)) > 0  # the second stage lies on the other four
    assert seconds(layout(0, 8), layout(8, 8)) > 0


def test_what_waits_in_host_memory_comes_over_the_host_link() -> None:
    whole = layout(0, 8)
    copies = copies_of(at(whole), [whole])
    away = replace(copies, away=~copies.away)
    found = float(move_seconds(away, copies)[0, 0])
    assert found > 2 * at(whole).model.n_params() / 50e9


def test_nodes_get_each_byte_once_through_all_their_cards() -> None:
    """70B to eight ranks of one other node: 141 GB over eight NICs at 40 GB/s, 0.44 s; over one rank's link 0.05 s."""
    name = "meta-llama/Llama-3.1-70B"
    found = seconds(layout(0, 8, 8), layout(8, 8, 8), name)
    assert found == pytest.approx(141.1e9 / 8 / 40e9, rel=0.2)
    replicas = seconds(layout(0, 8, 8), layout(8, 24, 8), name)
    assert replicas == pytest.approx(found, rel=0.01)  # every node of three gets a copy at the same time
    near = seconds(layout(0, 4, 4), layout(4, 4, 4), name)
    assert near < found / 2


def test_experts_are_cut_over_their_own_ranks() -> None:
    spread = replace(layout(0, 8, 1), ep=8)
    point = at(spread, "Qwen/Qwen3-30B-A3B")
    assert device_bytes(point, spread) < device_bytes(point, layout(0, 8, 1)) / 4
    assert device_bytes(point, layout(0, 8, 8)) < device_bytes(point, spread)
    both = replace(layout(0, 8, 4), ep=2)  # training: whole experts on one of 2; serving: cut over 4
    assert device_bytes(point, both) == device_bytes(point, layout(0, 8, 4)) < device_bytes(point, both, serves=False)
    for serves in (True, False):
        held = memory.frozen_copy(point.model, BF16, both, serves).weights
        assert device_bytes(point, both, serves) == pytest.approx(held, rel=1e-3)
    source, plain = copies_of(point, [both], serves=False), copies_of(point, [both, layout(0, 8, 4)])
    assert (move_seconds(source, plain) > 0).all()
    assert (move_seconds(plain, plain) == 0).all()
    sharded = layout(0, 8, 1, sharding="fsdp")
    assert device_bytes(point, sharded) == pytest.approx(2 * point.model.n_params() / 8)


def test_one_copy_elsewhere_is_a_move_from_other_nodes() -> None:
    target = layout(8, 8, 4)
    assert reallocation_seconds(copies_of(at(target), [target]), far=True) == pytest.approx(
        seconds(layout(0, 8, 8), target)
    )


def test_tables_are_made_in_one_call() -> None:
    source = [layout(0, 32, tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)] * 4
    target = [layout(0, 32, tp) for tp in (1, 2, 4, 8)] * 10
    here, there = copies_of(at(source[0]), source), copies_of(at(target[0]), target)
    table = move_seconds(here, there)
    assert table.shape == (len(source), len(target))
    assert table[0, 0] == 0 and np.all(table >= 0)
    one = seconds(source[5], target[2])
    assert table[5, 2] == pytest.approx(one)


@given(layouts(), layouts(), st.sampled_from(["link_bytes_per_s", "nic_bytes_per_s"]))
def test_faster_links_never_take_longer(one: Layout, other: Layout, field: str) -> None:
    point = at(other)
    faster = replace(point, cluster=replace(point.cluster, **{field: 2 * getattr(point.cluster, field)}))
    slow = move_seconds(copies_of(point, [one]), copies_of(point, [other]))
    assert move_seconds(copies_of(faster, [one]), copies_of(faster, [other])) <= slow


def test_groups_of_a_mixed_cluster_share_no_node() -> None:
    here, there = layout(0, 4), layout(4, 4)
    point = at(here)
    near = move_seconds(copies_of(point, [here]), copies_of(point, [there]))
    far = move_seconds(copies_of(point, [here]), copies_of(point, [there], first_device=4))
    assert far > near


def test_offloading_shares_the_host() -> None:
    machine = cluster("H100-SXM", 8)
    assert offload_seconds(machine, 40e9) == pytest.approx(40e9 / 37.5e9)  # eight devices at 300 GB/s together
    assert offload_seconds(cluster("H100-SXM", 1), 45e9) == pytest.approx(1.0)
    slower = replace(device_kind("H100-SXM").costs, host=0.45)
    assert offload_seconds(cluster("H100-SXM", 1), 45e9, slower) == pytest.approx(2.0)
    assert offload_seconds(machine, 40e9, slower) == pytest.approx(40e9 / 22.5e9)
    assert offload_seconds(cluster("cpu", 2), 1e9) > 0


def test_samples_take_longer_from_other_nodes_and_share_the_host() -> None:
    machine = cluster("H100-SXM", 8, 2)
    near, far = (transfer_seconds(machine, 1e9, far=far) for far in (False, True))
    assert near == pytest.approx(1e9 / 37.5e9, rel=0.05)
    assert far == pytest.approx(near + 1e9 / 2e9, rel=0.01)
    assert transfer_seconds(cluster("cpu", 2), 1e6, far=False) < 0.01


def chosen(source: Layout, target: Layout, faster: dict[str, float] | None = None, nodes: int = 4) -> Transport:
    """The transport of weights from one layout to another, with these rates of devices changed."""
    points = (at(source, nodes=nodes), at(target, nodes=nodes))
    changed = [replace(one, cluster=replace(one.cluster, **(faster or {}))) for one in points]
    copies = [copies_of(one, [one.layout]) for one in changed]
    return TRANSPORTS[int(fastest_transports(copies[0], copies[1])[1][0, 0])]


def test_weights_take_the_fastest_transport() -> None:
    """NVLink is faster than the host's memory; cards on PCIe alone are not."""
    assert chosen(layout(0, 8, 2), layout(0, 8, 2)) == "in_place"
    assert chosen(layout(0, 8), layout(0, 4)) == "in_place"
    assert chosen(layout(0, 8, 8), layout(0, 8, 4)) == "device"
    assert chosen(layout(0, 8, 8), layout(0, 8, 4), {"link_bytes_per_s": 2e10}) == "host"
    assert chosen(layout(0, 1), layout(1, 1), {"link_bytes_per_s": 1e12, "pcie_bytes_per_s": 1e9}) == "device"
    copies = copies_of(at(layout(0, 8)), [layout(0, 8)])
    away = replace(copies, away=~copies.away)
    assert TRANSPORTS[int(fastest_transports(away, copies)[1][0, 0])] == "host"
    cpus = [
        copies_of(Setting(known("Qwen/Qwen3-0.6B"), BF16, one, cluster("cpu", 4)), [one])
        for one in (layout(0, 2), layout(2, 2))
    ]
    assert TRANSPORTS[int(fastest_transports(cpus[0], cpus[1])[1][0, 0])] == "device"
    ways: tuple[Transport, ...] = ("device", "host")
    for only in ways:  # of an engine that has no other
        assert TRANSPORTS[int(fastest_transports(cpus[0], cpus[1], (only,))[1][0, 0])] == only
        assert fastest_transports(cpus[0], cpus[1], (only,))[0] == fastest_transports(cpus[0], cpus[1])[0]
        assert TRANSPORTS[int(fastest_transports(away, copies, (only,))[1][0, 0])] == "host"


@pytest.mark.slow
@settings(max_examples=200)
@given(layouts(), layouts(), st.sampled_from([1e10, 5e10, 4e11]), st.sampled_from([5e9, 5e10, 1e12]))
def test_no_other_transport_is_faster_and_only_what_is_in_place_takes_no_time(
    one: Layout, other: Layout, link: float, pcie: float
) -> None:
    """The other transport is what is left where the rate of one is cut to almost nothing."""

    def seconds_at(link: float, pcie: float, transports: tuple[Transport, ...] = TRANSPORTS) -> tuple[float, Transport]:
        rates = {"link_bytes_per_s": link, "pcie_bytes_per_s": pcie}
        copies = [
            copies_of(replace(point, cluster=replace(point.cluster, **rates)), [point.layout])
            for point in (at(one), at(other))
        ]
        found, number = fastest_transports(copies[0], copies[1], transports)
        return float(found[0, 0]), TRANSPORTS[int(number[0, 0])]

    least, way = seconds_at(link, pcie)
    (device, by_device), (host, by_host) = seconds_at(link, 1.0), seconds_at(1.0, pcie)
    assert least == pytest.approx(min(device, host))
    assert seconds_at(link, pcie, ("device",)) == (device, by_device)
    assert seconds_at(link, pcie, ("host",)) == (host, by_host)
    assert (least == 0) == (way == "in_place")
    if least > 0:
        assert (by_device, by_host) == ("device", "host")
        assert way == ("device" if device <= host else "host")


def test_processes_of_one_host_copy_what_they_lack_once() -> None:
    """Out of the trained weights where these lie: a byte is read and written by the core that gets it. Offloaded ones
    come as messages."""
    machine, there = cluster("cpu", 4), layout(2, 2, 2)
    whole = Setting(known("Qwen/Qwen3-0.6B"), BF16, layout(0, 2, 1), machine)
    nbytes = 2 * whole.model.n_params()
    target = copies_of(whole, [there])
    read, sent = (
        float(move_seconds(copies_of(whole, [layout(0, 2, 1)], away=np.array([away])), target)[0, 0])
        for away in (False, True)
    )
    costs = device_kind("cpu").costs
    assert read == pytest.approx(2 * (nbytes / 2) / (machine.memory_bytes_per_s * costs.memory), rel=0.03)
    assert sent > nbytes / 2 / (machine.link_bytes_per_s * costs.p2p) > 1.2 * read
