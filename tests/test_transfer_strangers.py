"""The data plane serves peers alone, and who is none is told so at once."""

import contextlib
import time

import pytest
import torch
import zmq

from realgraph.runtime.store import bundle
from realgraph.runtime.store.bundle import PeerLostError
from realgraph.runtime.store.local import connect_local
from realgraph.runtime.store.remote import RemoteChannel
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane, GatherRequest
from realgraph.runtime.wire.curve import LOOPBACK, make_keys
from tests.test_transfer import four

__all__ = ["four"]


def test_strangers_get_nothing(four: list[DataPlane]) -> None:
    """TCP: only keys of peers. Unix socket: malformed requests end the connection, and nothing else."""
    owner = four[1]
    owner._store.put("s", [0], [torch.ones(3)])
    with DataPlane(7, Store(1 << 16), make_keys(), LOOPBACK) as stranger:
        stranger.connect([owner.peer])
        with pytest.raises(PeerLostError, match="did not accept this worker: its key was refused"):
            stranger.gather_now([GatherRequest(1, "s", (0,))], route="tcp", deadline_seconds=60)
    body = bundle.encode(bundle.Fetch((), 1, 1.0))
    for junk in (b"\0\0\0\1\xc1", b"\xff" * 100, len(body).to_bytes(4, "big") + body):
        connection = connect_local(owner.peer.local)
        connection.settimeout(10)
        connection.sendall(junk)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        connection.close()
    assert torch.equal(four[0].gather_now([GatherRequest(1, "s", (0,))])["s"][0], torch.ones(3))


def test_a_refusal_that_came_before_the_request_is_named_at_once(four: list[DataPlane]) -> None:
    """The refusal takes the connection's queue away, so that the request finds no room for ever."""
    with zmq.Context() as context:
        channel = RemoteChannel(four[1].peer, make_keys(), context)
        try:
            last = time.monotonic() + 60
            while channel._socket.poll(10, zmq.POLLOUT):
                assert time.monotonic() < last
                time.sleep(0.01)
            with pytest.raises(PeerLostError, match="did not accept this worker: its key was refused"):
                channel.ask((bundle.Item("s", (0,)),), bundle.Deadline(60))
        finally:
            channel.close()
