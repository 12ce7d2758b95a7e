"""CurveZMQ: the key pairs of a run, and who may connect. Keys travel through inherited descriptors only."""

from collections.abc import Collection, Sequence
from typing import Any

import zmq
from msgspec import Struct
from zmq.utils import z85

LOOPBACK = "127.0.0.1"  # nobody outside this host may connect
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_HANDSHAKE_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key was refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it speaks no CurveZMQ, or expects another key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake broke off",
}
MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_HANDSHAKE_FAILURES)

# A peer that answers no ping for this long counts as gone; the sockets' own thread answers, however busy Python is.
PING_SECONDS = 5
SILENT_SECONDS = 30


class KeyPair(Struct, frozen=True):
    """A CurveZMQ key pair, both parts in Z85. Its repr keeps the secret to itself, so that no log shows it."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, ...)"


def make_keys() -> KeyPair:
    """A new random key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def secure_server(socket: zmq.Socket[Any], keys: KeyPair) -> None:
    """Make a socket a CurveZMQ server; the ZAP handler of its context says who may connect. Before it binds."""
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_server = True
    socket.zap_domain = b"realgraph"


def secure_client(socket: zmq.Socket[Any], keys: KeyPair, server_key: str) -> None:
    """Make a socket a CurveZMQ client that talks to nobody but the holder of `server_key`. Before it connects."""
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_serverkey = server_key.encode()


def is_local(address: str) -> bool:
    """True where an interface or a `tcp://` address is this host's own."""
    return address.removeprefix("tcp://").startswith(("127.", "localhost", "[::1]", "::1"))


def give_up_silent(socket: zmq.Socket[Any]) -> None:
    """Close connections to other hosts that have gone silent. On one host the kernel says when a process has ended, and
    one that is stopped is only silent. Before it binds or connects."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_SECONDS * 1000)


def answer_zap(request: Sequence[bytes], allowed: Collection[str]) -> list[bytes]:
    """The reply to one request of the ZeroMQ authentication protocol (RFC 27): is this client's key allowed?

    The key becomes the User-Id of what the client sends.
    """
    if len(request) != 7 or request[0] != b"1.0":
        return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"malformed request", b"", b""]
    _version, request_id, _domain, _address, _identity, mechanism, key = request
    if mechanism != b"CURVE" or len(key) != 32:
        return [b"1.0", request_id, b"400", b"CURVE only", b"", b""]
    public = z85.encode(key)
    if public.decode() not in allowed:
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]
    return [b"1.0", request_id, b"200", b"OK", public, b""]


def bound_address(socket: zmq.Socket[Any]) -> str:
    """The address, port included, that a socket bound to port 0 got."""
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.decode().rstrip("\0")


def handshake_failure(event: int) -> str:
    """The message of a monitor's event about a failed handshake, '' for every other event."""
    return _HANDSHAKE_FAILURES.get(event, "")
