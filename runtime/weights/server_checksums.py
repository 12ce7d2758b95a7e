"""Comparisons of what the SGLang servers of a call hold, by the checksums that each tells of its tensors as it has
fused and cut them: with its own after it has read the same weights once more, with those of the other servers, and with
its own of older weights. Checksums of what servers were given are compared elsewhere."""

import hashlib
from collections.abc import Mapping, Sequence

from realgraph.runtime.parallel.checksums import WeightsDiffer
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.rollout.weights.agreement import UpdateWords

SUMS = "sums/"  # the word of a server's worker, with its place behind it
_HINT = "this is a mistake of the server or of the way that weights come to it (runtime.verify_weights)"


class ChecksumComparison:
    """The weights that one server holds. Raises WeightsDiffer. places: of all servers of the call; one tensor-parallel
    size. place: of this one."""

    def __init__(self, words: UpdateWords, places: Sequence[int], place: int) -> None:
        self._words, self._places, self._place = words, places, place
        self._before: tuple[str, str] | None = None  # of the weights compared last: as given, as held

    def compare(self, engine: SglangEngine, *, broadcast: bool, together: bool = True) -> None:
        """Look at the weights that the server has now; where its release tells no checksums, do nothing. broadcast:
        they came so, and lie in its folder, too. together: all servers of the call take them; else a worker may be
        gone, and with it the store of the words."""
        reported = engine.server_checksums()
        if reported is None:
            return
        if broadcast:
            engine.read_again()
            if name := first_difference(reported, engine.server_checksums() or reported):
                text = f"does not hold {name!r} as it was broadcast: read from disk, it has another checksum"
                raise self._differ(engine, text)
        mine, given = digest(reported), digest({"": str(engine.checksums().tolist())})
        if self._before is not None and self._before[0] != given and self._before[1] == mine and not engine.quantized:
            raise self._differ(engine, "holds what it held before, though it was given other weights")
        self._before = given, mine
        if not together:
            return
        self._words.post(engine.version, f"{SUMS}{self._place}", mine)
        for other in self._places:  # whoever is the last to tell sees them all, so nobody has to wait
            said = self._words.said(engine.version, f"{SUMS}{other}")
            if said not in (None, mine):
                raise self._differ(engine, f"does not hold the weights that server {other} of its call holds")

    def _differ(self, engine: SglangEngine, text: str) -> WeightsDiffer:
        return WeightsDiffer(f"the SGLang server {engine.url}, version {engine.version}, {text}: {_HINT}")


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first name of those whose values differ, or that one of them lacks."""
    return next((name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)), None)


def digest(checksums: Mapping[str, str]) -> str:
    """One number for all of them."""
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
