"""Predicted seconds of collectives between devices. Ring collectives: Patarasuk & Yuan 2009."""

from msgspec import Struct

from realgraph.planner.costs.overhead import COLLECTIVE_SECONDS, Operation, collective_seconds, link_share
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.model_spec import ModelSpec

HOP_SECONDS = 2e-6  # of one step of a ring: half of NCCL's base latency over InfiniBand, more than NVLink's


class Link(Struct, frozen=True):
    """The connection between the ranks of one axis of a layout, in bytes a second of each device."""

    inside: int  # how many of the ranks share a node
    bytes_per_s: float  # of a ring through all ranks
    link_bytes_per_s: float  # inside a node
    nic_bytes_per_s: float  # between nodes


def axis_link(setting: Setting, ranks: int, stride: int, operation: Operation = "allreduce") -> Link:
    """The link of `ranks` devices that are `stride` apart (`plan/axes.py`: stride_of), as fast as for an operation.

    A ring enters each node once with all the NICs of its members there, so hierarchical collectives gain nothing more.
    """
    cluster, costs = setting.cluster, setting.costs
    link, nic = cluster.link_bytes_per_s * link_share(costs, operation), cluster.nic_bytes_per_s * costs.nic
    inside = max(1, min(ranks, cluster.devices_per_node // stride))
    if inside >= ranks:
        return Link(ranks, link, link, nic)
    return Link(inside, min(link, nic * inside) if inside > 1 else nic, link, nic)


def collective_bytes_per_s(setting: Setting, ranks: int) -> float:
    """Bandwidth of a ring over `ranks` neighbouring devices: the link inside a node, all its NICs between nodes."""
    return axis_link(setting, ranks, 1).bytes_per_s


def hop_seconds(setting: Setting, ranks: int, operation: Operation = "allreduce") -> float:
    """Latency of one ring collective over `ranks` devices."""
    if ranks == 1:
        return 0.0
    return collective_seconds(setting.cluster, setting.costs, operation) + HOP_SECONDS * (ranks - 1)


def allreduce_seconds(nbytes: float, ranks: int, bytes_per_s: float, latency: float = COLLECTIVE_SECONDS) -> float:
    """Seconds of a ring all-reduce of `nbytes` a rank: each moves 2 (n - 1) / n of its buffer."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * nbytes / bytes_per_s + 2 * latency


def gather_seconds(nbytes: float, ranks: int, bytes_per_s: float, latency: float = COLLECTIVE_SECONDS) -> float:
    """Seconds of a ring all-gather to (or reduce-scatter from) `nbytes` on each rank."""
    return 0.0 if ranks == 1 else (ranks - 1) / ranks * nbytes / bytes_per_s + latency


def exchange_seconds(setting: Setting, nbytes: float, ranks: int, link: Link) -> float:
    """Seconds to send a token of `nbytes` to the experts that it chose among `ranks` devices.

    It crosses to each other node once, through this device's NIC, and goes on there over the link; both at once
    (DeepSeek-V3, arXiv:2412.19437, sec. 3.2.2). With an engine of plain exchanges it crosses for each expert there.
    """
    model, nodes = setting.model, ranks / link.inside
    crossing = model.experts_per_token if setting.engine.expert_copies else nodes_reached(model, nodes)
    far = nbytes * crossing * (nodes - 1) / nodes
    near = nbytes * model.experts_per_token * (link.inside - 1) / link.inside
    return max(near / link.link_bytes_per_s, far / link.nic_bytes_per_s)


def nodes_reached(model: ModelSpec, nodes: float) -> float:
    """Expected distinct nodes of the experts that a token chooses, of `nodes` that hold equal shares of them.

    Of n places, k choices meet n (1 - (1 - 1/n)^k). Where a token keeps to some groups of experts, neighbours in their
    order, so it does to the nodes that hold these (arXiv:2412.19437, sec. 2.1.2).
    """
    groups, kept = model.router_groups, model.router_groups_per_token
    if nodes > groups:  # a group lies on several
        places = nodes * kept / groups
        return _distinct(places, model.experts_per_token, 1 / places)
    met = _distinct(kept, model.experts_per_token, 1 / kept)
    return _distinct(nodes, groups / nodes, met / groups)


def _distinct(places: float, choices: float, chance: float) -> float:
    """Expected places that some of so many choices meet, each with this chance."""
    return places * (1 - float((1 - chance) ** choices))
