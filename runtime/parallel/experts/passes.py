"""Forward passes of generation where replicas share experts: as many on each as on the one with the most.

The all-to-all exchanges of a layer take every worker whose experts are spread, with rows or without. Replicas make
passes of their own sequences, some more than others in a step; who has no more sends no rows along until all are done.
"""

from typing import Any

import torch
from torch import nn

from realgraph.runtime.parallel.experts.block import SparseBlock
from realgraph.runtime.parallel.groups import Ranks


class SharedPasses:
    """The passes of one network. ranks: all workers that generate together."""

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        self._blocks = [block for block in network.modules() if isinstance(block, SparseBlock)]
        self._ranks = ranks

    def begin(self) -> None:
        """A pass of own rows follows. Collective with `begin` and `finish` of the others."""
        self._another(own=True)

    def finish(self) -> None:
        """This step's own passes have ended: take part in those of others until theirs have, too."""
        while self._another(own=False):
            for block in self._blocks:
                block.pass_by()

    def _another(self, *, own: bool) -> bool:
        """Somebody makes another pass."""
        return bool(self._ranks.largest(torch.tensor([own], dtype=torch.int32)))


def share_passes(network: Any, ranks: Ranks) -> None:
    """Tell a network that others generate with its experts; `shared_passes_of` then knows."""
    network.shared_passes = SharedPasses(network, ranks)


def shared_passes_of(network: nn.Module) -> SharedPasses | None:
    """The passes of a network whose experts other replicas use, too."""
    passes = getattr(network, "shared_passes", None)
    return passes if isinstance(passes, SharedPasses) else None
