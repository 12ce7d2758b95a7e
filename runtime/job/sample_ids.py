"""The numbers of samples: a group's number and the sample's place in it, in one; and the seeds of their draws. Pure; no
group's size is known here.

So a group may have any number of samples, and may lose some: those that are left keep their numbers.
"""

import hashlib

from realgraph.graphs.spec import MOST_SAMPLES


def sample_id(group: int, place: int) -> int:
    """The number of the sample at a place of a group, from 0."""
    return group * MOST_SAMPLES + place


def sample_ids(group: int, n: int) -> range:
    """The numbers of the first `n` samples of a group."""
    first = group * MOST_SAMPLES
    return range(first, first + n)


def group_of(sample: int) -> int:
    """The group of a sample."""
    return sample // MOST_SAMPLES


def place_of(sample: int) -> int:
    """The place of a sample in its group, from 0."""
    return sample % MOST_SAMPLES


def held_out_group(row: int) -> int:
    """The number of the group of a held-out row: below those of training, so that none is met twice."""
    return -1 - row


def is_held_out(group: int) -> bool:
    """True of the group of a held-out row."""
    return group < 0


def row_held_out(group: int) -> int:
    """The held-out row of such a group."""
    return -1 - group


def call_seed(seed: int, call: str) -> int:
    """63 bits for a later generate call of a group, whose samples have the numbers of the first's."""
    return sample_seed(seed, int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little"))


def sample_seed(seed: int, sample: int) -> int:
    """63 bits that depend on the run's seed and the sample alone, so that a resumed run draws the same tokens."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
