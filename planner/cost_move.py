"""Predicted seconds of moving weights between copies."""

from realgraph.planner.cost import Setting
from realgraph.planner.memory import shards


def reallocation_seconds(setting: Setting) -> float:
    """Trained weights to another copy: each device of the copy takes its part over the slowest link between the two."""
    nbytes = setting.element * setting.model.n_params(setting.role.head) / shards(setting.layout)
    one_node = setting.cluster.nodes == 1
    rate = setting.cluster.link_bytes_per_s * setting.costs.link
    return nbytes / (rate if one_node else min(rate, setting.cluster.nic_bytes_per_s * setting.costs.nic))
