"""Hostile traffic against the ports of a run: garbage, greetings without a key, wrong keys, and, with the right key,
messages that can't be read. It goes to addresses of this machine alone, in loops that have an end.
"""

import contextlib
import ipaddress
import random
import secrets
import socket
import time
from collections.abc import Sequence

import zmq

from realgraph.runtime.hosts.messages import HostBeat, HostEnded, Looked
from realgraph.runtime.hosts.messages import encode as encode_for_hub
from realgraph.runtime.store import bundle
from realgraph.runtime.wire.curve import KeyPair, make_keys, secure_client
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Generated, Heartbeat, Hello, Peer, Sample
from realgraph.runtime.wire.protocol import encode as encode_for_master

MOST_SECONDS = 120.0  # of one attack
PEER = Peer(1, "host", "@local", "tcp://127.0.0.1:1", "k" * 40)
FOR_MASTER = tuple(
    map(
        encode_for_master,
        (
            Heartbeat(1, 5, 5),
            Hello(1, 5, PEER),
            Done(1, 3, "train", {"loss": Mean(1.0)}, {"coef": 0.5}, {4: (40_000,)}, transcripts=("text",)),
            Generated(1, "rollout", (1, 2), (Sample(10_000, 20), Sample(20_000, 30)), {"length": Mean(2.0)}),
        ),
    )
)
FOR_HUB = tuple(map(encode_for_hub, (HostBeat(), HostEnded(), Looked(("path",), True))))
FOR_OWNER = tuple(
    map(
        bundle.encode,
        (
            bundle.Fetch((bundle.Item("nothing", (1, 2, 3)),), 8, 5.0),
            bundle.Credit(3),
            bundle.Release(),
            bundle.SharedFetch(1, 2, ((0, (bundle.Item("x", (1,)),)),), 1.0),
        ),
    )
)
_DEEP = b"\x91" * 50_000  # arrays in arrays
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_OPEN = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)
_HUGE = b"\x06" + (1 << 30).to_bytes(8, "big") + b"\x05HELLO"


def mutated(rng: random.Random, valid: bytes) -> bytes:
    """A message with some bytes changed, taken out or put in, or its end cut off."""
    found = bytearray(valid)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found))
        match rng.randrange(4):
            case 0:
                found[at] = rng.randrange(256)
            case 1 if len(found) > 1:
                del found[at]
            case 2:
                found.insert(at, rng.randrange(256))
            case _:
                del found[at + 1 :]
    return bytes(found)


def message(rng: random.Random, valid: Sequence[bytes]) -> list[bytes]:
    """The frames of a message that is wrong in some way."""
    lot = rng.random()
    if lot < 0.8:
        return [mutated(rng, rng.choice(valid))]
    if lot < 0.9:
        return [rng.randbytes(rng.randrange(300))]
    if lot < 0.95:
        return [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(2, 5))]
    if lot < 0.99:
        return [rng.choice(valid)[:-1] + b"\xff\xfe"]
    return [b"\x82\xa4type\xa9Heartbeat\xa1z" + _DEEP]


def garbage(address: str, count: int, rng: random.Random) -> None:
    """So many connections that speak nothing that the port understands, or begin to."""
    host, port = _own(address)
    last = time.monotonic() + MOST_SECONDS
    for _ in range(count):
        assert time.monotonic() < last, "the port takes connections too slowly"
        start = rng.choice((b"", b"GET / HTTP/1.1\r\n\r\n", _GREETING, _OPEN, mutated(rng, _GREETING)))
        rest = rng.choice((rng.randbytes(rng.randrange(2000)), mutated(rng, _HELLO), _HELLO, _HUGE, b""))
        with contextlib.suppress(ConnectionError, TimeoutError), socket.create_connection((host, port), 5) as one:
            one.sendall(start + rest)
            if rng.random() < 0.1:
                one.settimeout(0.01)
                one.recv(200)


def strangers(address: str, server_key: str, count: int, rng: random.Random) -> None:
    """So many ZeroMQ sockets without a key, with one that nobody knows, or that expect another server."""
    _own(address)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for start in range(0, count, 50):
        made = []
        for _ in range(min(50, count - start)):
            one = context.socket(zmq.DEALER)
            one.linger = 0
            kind = rng.randrange(3)
            if kind:
                secure_client(one, make_keys(), server_key if kind == 1 else make_keys().public)
            one.connect(address)
            one.send(rng.randbytes(rng.randrange(100)))
            made.append(one)
        time.sleep(0.1)
        for one in made:
            one.close(linger=0)
    context.destroy(linger=0)


def insider(address: str, keys: tuple[KeyPair, str], name: bytes, what: tuple[Sequence[bytes], int], seed: int) -> int:
    """Wrong messages from a client that may speak. keys: its own, and the server's public one. what: messages to spoil,
    and how many; the number of messages that were sent."""
    _own(address)
    rng, (valid, count) = random.Random(seed), what
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one = context.socket(zmq.DEALER)
    one.setsockopt(zmq.ROUTING_ID, name or secrets.token_hex(8).encode())
    one.setsockopt(zmq.SNDTIMEO, int(MOST_SECONDS * 1000))
    one.setsockopt(zmq.LINGER, int(MOST_SECONDS * 1000))
    secure_client(one, *keys)
    one.connect(address)
    for _ in range(count):
        one.send_multipart(message(rng, valid))
        if one.poll(0):
            one.recv_multipart()
    one.close()
    context.term()  # once all has been handed over
    return count


def _own(address: str) -> tuple[str, int]:
    """Host and port of an address that is this machine's: of its loopback, or private, as namespaces have it."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    ip = ipaddress.ip_address(host)
    assert ip.is_loopback or ip in ipaddress.ip_network("10.0.0.0/8"), f"{host} may be another's"
    return host, int(port)
