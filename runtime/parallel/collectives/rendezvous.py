"""The means by which workers form their process groups: a store that one of them opens, and gloo with one port and one
thread a process.

On one host the store is a file that no other user can read; over hosts torch's own, on the interface of the run alone.
"""

import os
import platform
import shutil
import socket
import sys
import tempfile
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import Backend, ProcessGroupGloo

from realgraph.runtime.wire.curve import is_local

LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"
GLOO = "realgraph_gloo"


class CollectiveError(RuntimeError):
    """A collective failed or missed its deadline: a rank of the group is gone or far behind."""


_TCP = "tcp://"


class Rendezvous(Protocol):
    """One worker's part of the meeting of all; `close` it once the groups have ended."""

    @property
    def address(self) -> str:
        """The address that `reach_store` takes."""
        ...

    def close(self) -> None:
        """The address means nothing any more."""
        ...


def open_rendezvous(interface: str) -> Rendezvous:
    """The meeting of the workers that listen on `interface`: on this host alone, or over the network."""
    return FileRendezvous() if is_local(interface) else NetworkRendezvous(interface)


class NetworkRendezvous:
    """torch's store, listening on one address of this host. It does not ask who connects."""

    def __init__(self, interface: str) -> None:
        with socket.create_server((interface, 0)) as listener:
            port = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                interface, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.address = f"{_TCP}{interface}:{port}"

    def close(self) -> None:
        """The store ends with its last user."""
        self._store = None


class FileRendezvous:
    """A worker's file through which those of one host meet: nobody but this user can open it.

    On Linux it is anonymous memory, reached through /proc, so that nothing is left of it after any end; elsewhere a
    file in a folder of its own. `close` it once the groups have ended.
    """

    def __init__(self) -> None:
        self._folder = ""
        if sys.platform == "linux":
            self._file = os.memfd_create("realgraph-rendezvous", os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)
            self.address = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._folder = tempfile.mkdtemp(prefix="realgraph-")  # mode 0700
            self.address = os.path.join(self._folder, "rendezvous")
            self._file = os.open(self.address, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def close(self) -> None:
        """The file is gone; the address means nothing any more."""
        os.close(self._file)
        if self._folder:
            shutil.rmtree(self._folder)


def reach_store(address: str, n_workers: int, timeout_seconds: float) -> Store:
    """The store of a Rendezvous. Raises CollectiveError where there is none, or it can't be opened."""
    if address.startswith(_TCP):
        return _reach_over_network(address, timedelta(seconds=timeout_seconds))
    if not os.path.exists(address):  # torch would make a file of its own
        raise CollectiveError(f"the rendezvous {address} is gone, and so is the worker that opened it")
    try:
        store = FileStore(address, n_workers)
    except RuntimeError as error:
        raise CollectiveError(f"the rendezvous {address} can't be opened: {error}") from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def _reach_over_network(address: str, timeout: timedelta) -> Store:
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise CollectiveError(f"the rendezvous {address} can't be reached: {error}") from error


def register_gloo(interface: str) -> str:
    """The name of a backend that is gloo with one device for all groups of this process.

    torch's own "gloo" opens a device for every group: a port, and a thread that wakes a hundred times a second.
    interface: this host's address that the others reach; of this host alone, nobody outside may connect, whatever the
    host's name resolves to. Raises RuntimeError where there is no such network.
    """
    gloo: Any = ProcessGroupGloo
    local = is_local(interface)
    device = gloo.create_device(interface=LOOPBACK) if local else gloo.create_device(hostname=interface)

    def open_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        return ProcessGroupGloo(store, rank, size, options)

    Backend.register_backend(GLOO, open_group, devices=["cpu"])
    return GLOO
