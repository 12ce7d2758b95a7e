"""Forward passes of generation where replicas share experts: as many on each as on the one with the most.

The all-to-all exchanges of a layer take every worker whose experts are spread, with rows or without. Replicas make
passes of their own sequences, some more than others in a step; who has no more sends no rows along until all are done.
"""

from typing import Any

import torch
from torch import nn

from realgraph.runtime.parallel.experts.block import blocks_by_chunk
from realgraph.runtime.parallel.groups import Ranks


class SharedPasses:
    """The passes of one network. ranks: all workers that generate together, perhaps of all pipeline stages."""

    def __init__(self, network: nn.Module, ranks: Ranks, *, of_all_stages: bool) -> None:
        self._blocks = blocks_by_chunk(network)
        self._ranks = ranks
        self.of_all_stages = of_all_stages

    def another(self, *, own: bool) -> bool:
        """Somebody makes another pass. own: this worker does. Collective."""
        return bool(self._ranks.largest(torch.tensor([own], dtype=torch.int32)))

    def pass_by(self, chunk: int) -> None:
        """Take part in the pass of others through a chunk."""
        for block in self._blocks[chunk]:
            block.pass_by()


def share_passes(network: Any, ranks: Ranks, *, of_all_stages: bool) -> None:
    """Tell a network that others generate with its experts; `shared_passes_of` then knows."""
    network.shared_passes = SharedPasses(network, ranks, of_all_stages=of_all_stages)


def shared_passes_of(network: nn.Module) -> SharedPasses | None:
    """The passes of a network whose experts other replicas use, too."""
    passes = getattr(network, "shared_passes", None)
    return passes if isinstance(passes, SharedPasses) else None
