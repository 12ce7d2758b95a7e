"""What a fake worker of the simulator holds. Decides nothing and checks nothing."""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Worker:
    """One fake worker: keys of its store by sample, weights of its copies, groups still to make."""

    store: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    making: set[int] = field(default_factory=set)
    copies: dict[str, int] = field(default_factory=dict)  # call -> version

    def groups(self, samples_per_group: int) -> set[int]:
        """The groups of which it stores anything."""
        return {sample // samples_per_group for samples in self.store.values() for sample in samples}

    def forget(self, group: int, samples_per_group: int) -> None:
        """Everything that it stores of a group."""
        first = group * samples_per_group
        for held in self.store.values():
            held.difference_update(range(first, first + samples_per_group))
