"""Pages of a key-value cache: who holds which, and which are free. Knows numbers only, no tensor and no sequence."""

from collections.abc import Sequence

from realgraph.planner.costs.memory.terms import CACHE_PAGE_TOKENS

PAGE_TOKENS = CACHE_PAGE_TOKENS
_FIRST_PAGES = 31  # and one for padding


def pages_for(tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Pages 1 ... `total`, each free or held by one or more sequences. Page 0 is nobody's: padding is written there.

    most: pages that there may be; None: as many as are asked for. at_once: have them all as soon as one is needed, as
    growing costs more than memory; else `total` grows by doubling.
    """

    def __init__(self, most: int | None, *, at_once: bool) -> None:
        self._most, self._at_once = most, at_once
        self.total = 0
        self._free: list[int] = []  # the next one last
        self._holders: list[int] = [0]  # of each page, by its number

    @property
    def available(self) -> float:
        """Pages that `take` can give now; infinite without a bound."""
        return float("inf") if self._most is None else len(self._free) + self._most - self.total

    @property
    def n_used(self) -> int:
        """Pages that somebody holds."""
        return self.total - len(self._free)

    def take(self, n: int) -> list[int]:
        """Hold `n` free pages; there have to be so many (`available`)."""
        if n > len(self._free):
            self._grow(self.n_used + n)
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """Hold pages that others hold, too."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold these no longer; those that nobody else holds are free."""
        for page in pages:
            assert self._holders[page], f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def shrink(self) -> None:
        """Without a holder there is no page."""
        if not self.n_used:
            self.total, self._free, self._holders = 0, [], [0]

    def _grow(self, needed: int) -> None:
        total = max(needed, 2 * self.total, _FIRST_PAGES)
        if self._most is not None:
            assert needed <= self._most, f"{needed} pages are asked for, {self._most} allowed"
            total = self._most if self._at_once else min(total, self._most)
        # the lowest first: what was never used costs no memory on a host
        self._free[:0] = range(total, self.total, -1)
        self._holders += [0] * (total - self.total)
        self.total = total
