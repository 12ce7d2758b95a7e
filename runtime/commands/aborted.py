"""Groups whose making was given up: what still comes back of them has crossed the command, and is of no interest."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from realgraph.runtime.job.sample_ids import group_of
from realgraph.runtime.wire.protocol import Generated, Loaded

LATE_BATCHES = 20  # so much later than an abort begun groups are made when nothing is on its way any more from before

Answer = Generated | Loaded


class AbortedGroupsImage(Struct, frozen=True):
    """They as plain data."""

    untils: tuple[tuple[int, int, int], ...]  # worker, group, see `AbortedGroups`


class AbortedGroups:
    """They by the worker that has made them, each until the worker answers about a group so much later that nothing of
    it can be on its way any more."""

    def __init__(self) -> None:
        self._untils: dict[int, dict[int, int]] = {}  # worker -> group -> the later one

    @property
    def image(self) -> AbortedGroupsImage:
        """All that it has."""
        found = [(worker, group, until) for worker, ends in self._untils.items() for group, until in ends.items()]
        return AbortedGroupsImage(tuple(found))

    def restore(self, image: AbortedGroupsImage) -> None:
        """Go on from an image."""
        self._untils = {}
        for worker, group, until in image.untils:
            self.add(worker, [group], until)

    def add(self, worker: int, groups: Iterable[int], until: int) -> None:
        """`worker` is told to stop making `groups`. until: a group that it will be given long after."""
        self._untils.setdefault(worker, {}).update(dict.fromkeys(groups, until))

    def lose(self, worker: int) -> None:
        """A worker is gone: it answers nothing any more."""
        self._untils.pop(worker, None)

    def crossed(self, reply: Answer) -> tuple[set[int], Answer | None]:
        """The groups of a reply that were given up, and the reply without them; None where it is about no others."""
        ends = self._untils.get(reply.worker)
        if not ends:
            return set(), reply
        answered = {*reply.groups, *reply.skipped}
        gone, newest = answered & ends.keys(), max(answered, default=0)
        self._untils[reply.worker] = {group: until for group, until in ends.items() if until > newest}
        if not gone or gone == answered:
            return gone, None if gone else reply
        groups, skipped = ([group for group in part if group not in gone] for part in (reply.groups, reply.skipped))
        samples = [sample for sample in reply.samples if group_of(sample.sample) in groups]
        return gone, replace(reply, groups=tuple(groups), samples=tuple(samples), skipped=tuple(skipped))
