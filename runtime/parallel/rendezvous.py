"""The means by which the workers of one host form their process groups: a store in a file of worker 0's that no other
user can read, and gloo with one port and one thread a process."""

import os
import platform
import shutil
import sys
import tempfile
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, Store
from torch.distributed import Backend, ProcessGroupGloo

from realgraph.runtime.processes.environment import variables

LOOPBACK = "lo0" if platform.system() == "Darwin" else "lo"
GLOO = "realgraph_gloo"


class CollectiveError(RuntimeError):
    """A collective failed or missed its deadline: a rank of the group is gone or far behind."""


class Rendezvous:
    """Worker 0's file through which the workers of one host meet: nobody but this user can open it.

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
    """The store in the file of a Rendezvous. Raises CollectiveError where there is none, or it can't be opened."""
    if not os.path.exists(address):  # torch would make a file of its own
        raise CollectiveError(f"worker 0's rendezvous {address} is gone, and so is worker 0")
    try:
        store = FileStore(address, n_workers)
    except RuntimeError as error:
        raise CollectiveError(f"worker 0's rendezvous {address} can't be opened: {error}") from error
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def register_gloo(*, one_host: bool) -> str:
    """The name of a backend that is gloo with one device for all groups of this process.

    torch's own "gloo" opens a device for every group: a port, and a thread that wakes a hundred times a second.
    one_host: nobody outside may connect, whatever the host's name resolves to; else torch's variable names the
    interfaces. Raises RuntimeError where there is no such network.
    """
    gloo: Any = ProcessGroupGloo
    asked = LOOPBACK if one_host else variables().get("GLOO_SOCKET_IFNAME", "")
    names = [name for name in asked.split(",") if name]
    devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]

    def open_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
        return ProcessGroupGloo(store, rank, size, options)

    Backend.register_backend(GLOO, open_group, devices=["cpu"])
    return GLOO
