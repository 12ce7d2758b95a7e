"""Predicted seconds of collectives between devices. Ring collectives: Patarasuk & Yuan 2009."""

from realgraph.planner.cost import Setting
from realgraph.planner.cost_overhead import COLLECTIVE_SECONDS, collective_seconds


def collective_bytes_per_s(setting: Setting, ranks: int) -> float:
    """Bandwidth of a ring over `ranks` neighbouring devices: the link inside a node, all its NICs between nodes."""
    cluster, costs = setting.cluster, setting.costs
    link = cluster.link_bytes_per_s * costs.link
    if ranks <= cluster.devices_per_node:
        return link
    return min(link, cluster.nic_bytes_per_s * costs.nic * max(1, cluster.devices_per_node // setting.layout.tp))


def latency_seconds(setting: Setting) -> float:
    """Of one collective, as measured where it was."""
    return collective_seconds(setting.costs)


def allreduce_seconds(nbytes: float, ranks: int, bytes_per_s: float, latency: float = COLLECTIVE_SECONDS) -> float:
    """Seconds of a ring all-reduce of `nbytes` a rank: each moves 2 (n - 1) / n of its buffer."""
    return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * nbytes / bytes_per_s + 2 * latency


def gather_seconds(nbytes: float, ranks: int, bytes_per_s: float, latency: float = COLLECTIVE_SECONDS) -> float:
    """Seconds of a ring all-gather to (or reduce-scatter from) `nbytes` on each rank."""
    return 0.0 if ranks == 1 else (ranks - 1) / ranks * nbytes / bytes_per_s + latency
