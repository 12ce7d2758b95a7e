"""The control transport: what is sent arrives, in order, from whom it says; everything else is refused."""

import asyncio
import logging

import pytest
import zmq
import zmq.asyncio

from realgraph.runtime.wire import protocol
from realgraph.runtime.wire.curve import LOOPBACK, KeyPair, answer_zap, make_keys, secure_client
from realgraph.runtime.wire.sockets import TransportError
from realgraph.runtime.wire.transport import MasterSocket, WorkerSocket
from tests.waiting import becomes_true


def _hello(worker: int) -> protocol.Hello:
    return protocol.Hello(worker, 1, protocol.Peer(worker, "host", "local", "tcp://127.0.0.1:1", "key"))


async def _dial(socket: WorkerSocket, worker: int) -> None:
    await socket.send(_hello(worker))


@pytest.mark.parametrize("n_workers", [1, 5])
def test_every_message_arrives_once_and_in_order(n_workers: int) -> None:
    async def run() -> None:
        keys, clients = make_keys(), [make_keys() for _ in range(n_workers)]
        master = MasterSocket(keys, {i: pair.public for i, pair in enumerate(clients)}, LOOPBACK)
        workers = [WorkerSocket(i, master.address, pair, keys.public) for i, pair in enumerate(clients)]
        for i, worker in enumerate(workers):
            await _dial(worker, i)
        for _ in workers:
            number, reply = await asyncio.wait_for(master.receive(), 10)
            assert reply == _hello(number)
        for n in range(200):
            for i in range(n_workers):
                await master.send(i, protocol.Drop(groups=(n, i)))
        for i, worker in enumerate(workers):
            got = [await asyncio.wait_for(worker.receive(), 10) for _ in range(200)]
            assert got == [protocol.Drop(groups=(n, i)) for n in range(200)]
            assert worker.lost_seconds == 0.0
            await worker.send(protocol.Bye(i))
            assert await asyncio.wait_for(master.receive(), 10) == (i, protocol.Bye(i))
        for worker in workers:
            await worker.close()
        await master.close()

    asyncio.run(run())


def test_a_message_to_a_worker_that_is_not_there_is_an_error() -> None:
    async def run() -> None:
        master = MasterSocket(make_keys(), {0: make_keys().public}, LOOPBACK)
        with pytest.raises(TransportError, match="worker 0 is not connected"):
            await master.send(0, protocol.Shutdown())
        await master.close()

    asyncio.run(run())


def _stranger(context: zmq.asyncio.Context, name: bytes, keys: KeyPair, server_key: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    secure_client(socket, keys, server_key)
    socket.setsockopt(zmq.ROUTING_ID, name)
    return socket


def test_what_is_malformed_or_in_a_wrong_name_is_refused_and_nothing_breaks() -> None:
    """Holders of the run's keys alone reach the decoder; they cannot speak for one another."""

    async def run() -> None:
        keys, first, second = make_keys(), make_keys(), make_keys()
        master = MasterSocket(keys, {0: first.public, 1: second.public}, LOOPBACK)
        context = zmq.asyncio.Context()
        hello = protocol.encode(_hello(0))
        cases: list[tuple[bytes, KeyPair, list[bytes]]] = [
            (b"0", second, [hello]),  # the key of another worker
            (b"7", second, [hello]),  # no such worker
            (b"00", first, [hello]),  # not how a worker writes its number
            (b"1", second, [hello]),  # the right key, another's name inside
            (b"1", second, [b"\xc1 no msgpack"]),
            (b"1", second, [b"\x80"]),
            (b"1", second, [hello, hello]),
            (b"1", second, [b""]),
        ]
        receiving = asyncio.create_task(master.receive())
        for n, (name, pair, frames) in enumerate(cases):
            socket = _stranger(context, name, pair, keys.public)
            socket.connect(master.address)
            await socket.send_multipart(frames)
            async with asyncio.timeout(10):
                while master.refused <= n:
                    await asyncio.sleep(0.005)
            socket.close()
        assert not receiving.done()
        worker = WorkerSocket(0, master.address, first, keys.public)
        await _dial(worker, 0)
        assert await asyncio.wait_for(receiving, 10) == (0, _hello(0))
        await worker.close()
        await master.close()
        context.destroy()

    asyncio.run(run())


@pytest.mark.parametrize("case", ["unknown client", "wrong master", "no curve"])
def test_without_the_runs_keys_nobody_gets_in(case: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        keys, client = make_keys(), make_keys()
        master = MasterSocket(keys, {0: client.public}, LOOPBACK)
        receiving = asyncio.create_task(master.receive())
        if case == "unknown client":
            worker = WorkerSocket(0, master.address, make_keys(), keys.public)
            with pytest.raises(TransportError, match="its key was refused"):
                await asyncio.wait_for(worker.receive(), 10)
            with pytest.raises(TransportError, match="its key was refused"):  # the refusal took the queue away
                await asyncio.wait_for(worker.send(_hello(0)), 10)
            await worker.close()
        elif case == "wrong master":
            worker = WorkerSocket(0, master.address, client, make_keys().public)
            await becomes_true(lambda: "was refused" in caplog.text)
            assert worker.lost_seconds > 0
            await worker.close()
        else:
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(master.address)
                await socket.send(protocol.encode(_hello(0)))
                await becomes_true(lambda: "was refused" in caplog.text)
        await becomes_true(lambda: "was refused" in caplog.text)
        assert not receiving.done()
        receiving.cancel()
        await master.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())


def test_a_worker_sees_that_the_master_is_gone_and_finds_it_again() -> None:
    async def run() -> None:
        keys, client = make_keys(), make_keys()
        master = MasterSocket(keys, {0: client.public}, LOOPBACK)
        worker = WorkerSocket(0, master.address, client, keys.public)
        await _dial(worker, 0)
        await asyncio.wait_for(master.receive(), 10)
        assert worker.lost_seconds == 0.0
        await master.close()
        async with asyncio.timeout(10):
            while worker.lost_seconds == 0.0:
                await asyncio.sleep(0.01)
        await worker.close()

    asyncio.run(run())


def test_a_process_in_the_place_of_another_has_a_key_of_its_own() -> None:
    """Nothing is heard any more under the key before it, and what is sent goes to the new one."""

    async def run() -> None:
        keys, before, after = make_keys(), make_keys(), make_keys()
        master = MasterSocket(keys, {0: before.public}, LOOPBACK)
        old = WorkerSocket(0, master.address, before, keys.public)
        await _dial(old, 0)
        await asyncio.wait_for(master.receive(), 10)
        master.replace_key(0, after.public)
        receiving = asyncio.create_task(master.receive())
        await old.send(protocol.Bye(0))
        async with asyncio.timeout(10):
            while not master.refused:
                await asyncio.sleep(0.005)
        assert not receiving.done()
        await old.close()
        new = WorkerSocket(0, master.address, after, keys.public)
        await _dial(new, 0)
        assert await asyncio.wait_for(receiving, 10) == (0, _hello(0))
        await master.send(0, protocol.Shutdown())
        assert await asyncio.wait_for(new.receive(), 10) == protocol.Shutdown()
        again = WorkerSocket(0, master.address, before, keys.public)
        with pytest.raises(TransportError, match="its key was refused"):
            await asyncio.wait_for(again.receive(), 10)
        for socket in (new, again):
            await socket.close()
        await master.close()

    asyncio.run(run())


def test_secrets_show_in_no_repr() -> None:
    keys = make_keys()
    assert keys.secret not in repr(keys)
    assert keys.secret not in f"{keys} {[keys]}"


@pytest.mark.parametrize("frames", [[], [b"1.0"], [b"2.0"] + [b""] * 6, [b"1.0", b"1", b"", b"", b"", b"PLAIN", b"x"]])
def test_authentication_refuses_what_it_does_not_understand(frames: list[bytes]) -> None:
    assert answer_zap(frames, {"key"})[2] in (b"400", b"500")
