"""The messages between a check of machines and its workers, one on each host, both ways.

Tasks of pairs are numbered from 1, and so are their answers: one that comes too late is not taken for another.
"""

from typing import Literal

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from realgraph.runtime.doctor.facts import HostReport

BackendName = Literal["gloo", "nccl"]


class _CheckMessage(Struct, frozen=True, tag=True):
    pass


# --- to a worker ------------------------------------------------------------------------------------------------------


class Examine(_CheckMessage, frozen=True):
    """Look at your host, which is called `name`. token: a file in `folder` that holds `content`, where it is seen."""

    name: str
    folder: str
    token: str
    content: str


class OpenPair(_CheckMessage, frozen=True):
    """Open a store, tell its address, wait there for the other worker of the pair, and measure."""

    backend: BackendName
    number: int


class JoinPair(_CheckMessage, frozen=True):
    """Meet the other worker of the pair at its store, and send and receive as it does."""

    backend: BackendName
    number: int
    address: str


Task = Examine | OpenPair | JoinPair


# --- from a worker ----------------------------------------------------------------------------------------------------


class Connected(_CheckMessage, frozen=True):
    """The worker has dialled in."""

    number: int = 0


class Examined(_CheckMessage, frozen=True):
    """The answer to Examine. asked, answered: when, by this host's clock."""

    host: HostReport
    asked: float
    answered: float
    number: int = 0


class PairOpened(_CheckMessage, frozen=True):
    """The first answer to OpenPair."""

    address: str
    number: int


class PairMeasured(_CheckMessage, frozen=True):
    """The last answer to OpenPair and to JoinPair; of the latter without numbers. there: from who has opened."""

    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    latency_seconds: float = 0.0
    error: str = ""
    number: int = 0


Answer = Connected | Examined | PairOpened | PairMeasured

encode = Encoder().encode
decode_task: Decoder[Task] = Decoder(Task)
decode_answer: Decoder[Answer] = Decoder(Answer)
