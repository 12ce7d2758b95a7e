"""Messages between workers that share no process group, by sender and subject, in the order in which they were sent.

Each receiver has a queue and a thread, so that who sends never waits. What can't be delivered is tried again, until the
receiver is given up.
"""

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

MARK = b"\xc1"  # begins a message: msgpack never does, so other deposits are known from it
RETRY_SECONDS = 1.0


class Letter(Struct, frozen=True, array_like=True):
    """A message. process: of its sender in that worker's place, from 1 for one that stands for a lost one. number: of
    the process's messages to this receiver, rising: one that is delivered twice counts once."""

    sender: int
    process: int
    number: int
    subject: str
    data: bytes


_DECODER = msgspec.msgpack.Decoder(Letter)


class Mail:
    """One worker's, sent and received. Used from any thread. process: this one's number in the worker's place. deposit:
    gives another worker bytes; returns why that has failed, '' where it has not.

    A new process may send before this one learns of it (`join`): its messages wait until then.
    """

    def __init__(self, worker: int, deposit: Callable[[int, bytes], str], process: int = 0) -> None:
        self._worker, self._deposit, self._process = worker, deposit, process
        self._changed = threading.Condition()  # holds all below
        self._came: dict[tuple[int, int, str], deque[bytes]] = {}  # by sender, its process and subject
        self._newest: dict[tuple[int, int], int] = {}  # sender, its process -> number
        self._n_sent: dict[int, int] = {}  # by receiver
        self._gone: set[int] = set()
        self._processes: Counter[int] = Counter()  # worker -> number of the process in its place
        self._queues: dict[int, queue.SimpleQueue[tuple[int, bytes]]] = {}
        self._stop = threading.Event()

    # --- who is there -------------------------------------------------------------------------------------------------

    def give_up(self, worker: int) -> None:
        """A worker is gone: nothing is awaited from it, nothing is sent to it."""
        with self._changed:
            self._gone.add(worker)
            self._changed.notify_all()

    def join(self, worker: int, process: int) -> None:
        """A new process stands for a worker, by its number there, from 1; what those before it sent is forgotten."""
        with self._changed:
            self._gone.discard(worker)
            self._processes[worker] = process
            for key in [key for key in self._came if key[0] == worker and key[1] < process]:
                del self._came[key]

    def is_gone(self, worker: int) -> bool:
        """True of a worker that was given up, and in whose place there is no other yet."""
        with self._changed:
            return worker in self._gone

    def _is(self, worker: int, process: int) -> bool:
        return worker not in self._gone and self._processes[worker] == process

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, to: int, subject: str, data: bytes) -> None:
        """Send, and wait for nothing."""
        with self._changed:
            if to in self._gone or self._stop.is_set():
                return
            number = self._n_sent[to] = self._n_sent.get(to, 0) + 1
            letter = MARK + msgspec.msgpack.encode(Letter(self._worker, self._process, number, subject, data))
            if to not in self._queues:
                self._queues[to] = queue.SimpleQueue()
                threading.Thread(target=self._deliver, args=(to, self._queues[to]), name="mail", daemon=True).start()
            self._queues[to].put((self._processes[to], letter))

    def _deliver(self, to: int, letters: "queue.SimpleQueue[tuple[int, bytes]]") -> None:
        while not self._stop.is_set():
            (process, letter), warned = letters.get(), False
            while self._is(to, process) and (problem := self._deposit(to, letter)):
                if not warned:
                    log.warning("a message to worker %d is tried again: %s", to, problem)
                warned = True
                if self._stop.wait(RETRY_SECONDS):
                    return

    # --- receiving ----------------------------------------------------------------------------------------------------

    @staticmethod
    def is_letter(data: bytes) -> bool:
        """True of what another worker's `send` deposits."""
        return data[:1] == MARK

    def take(self, data: bytes) -> None:
        """A message of another worker. Raises msgspec.MsgspecError for one that can't be read."""
        letter = _DECODER.decode(data[1:])
        with self._changed:
            sender = letter.sender, letter.process
            if letter.process < self._processes[letter.sender] or letter.number <= self._newest.get(sender, 0):
                return
            self._newest[sender] = letter.number
            self._came.setdefault((*sender, letter.subject), deque()).append(letter.data)
            self._changed.notify_all()

    def wait(self, sender: int, subject: str, process: int = 0) -> bytes | None:
        """The next message of a worker under a subject; None where that worker is gone, as the master says at its
        deadline. process: see `join`; 0: the first that was there."""
        with self._changed:
            key = sender, process, subject
            self._changed.wait_for(lambda: self._came.get(key) or not self._is(sender, process))
            came = self._came.get(key) if self._is(sender, process) else None
            return came.popleft() if came else None

    def close(self) -> None:
        """Send nothing more."""
        self._stop.set()
