"""A configuration whose training was measured, in the terms of the cost functions."""

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.published import Row
from benchmarks.published_adapters import adapted_train_seconds
from benchmarks.published_routing import dealt_train_seconds
from realgraph.planner.costs.compute.train import Recompute, TrainWork, train_seconds
from realgraph.planner.costs.setting import Setting


class Case(Struct, frozen=True):
    """A configuration that was measured: what the formulas need of it."""

    setting: Setting
    work: TrainWork
    rows: dict[str, Row]  # its measurements by metric
    whole: float = 0.0  # share of layers that are computed again whole, the others as `work` says
    lora_rank: int = 0  # of trained adapters, 0 where all weights are trained
    dealt: bool = False  # the router deals experts in their order

    def seconds(self, recompute: Recompute) -> float:
        """Seconds of one optimizer step's arithmetic and traffic."""
        work = replace(self.work, recompute=recompute)
        if self.lora_rank:
            return adapted_train_seconds(self.setting, work, self.lora_rank)
        if self.dealt:
            return dealt_train_seconds(self.setting, work)
        return train_seconds(self.setting, work)
