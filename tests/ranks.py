"""Two rank processes that many tests share: a forkserver with torch loaded, and a gloo group between the two."""

import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

N_RANKS = 2
DEADLINE_SECONDS = 60.0


def _serve(pipe: Connection, rank: int, address: str) -> None:
    """A rank: join the group, then run what comes, until None."""
    import torch

    from realgraph.planner.layout import DeviceMesh
    from realgraph.runtime.parallel import Collectives, Member, open_store, reach_store

    torch.set_num_threads(1)
    store: Any
    if rank == 0:
        store, address = open_store("127.0.0.1", N_RANKS, DEADLINE_SECONDS)
        pipe.send(address)
    else:
        store = reach_store(address, N_RANKS, DEADLINE_SECONDS)
    member = Member(rank, N_RANKS, torch.device("cpu"), DEADLINE_SECONDS)
    mesh = DeviceMesh(0, N_RANKS)
    groups = Collectives(member, store, [mesh, DeviceMesh(0, 1), DeviceMesh(1, 1)], one_host=True)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(groups.ranks(mesh), *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    groups.close()


class RankProcesses:
    """Runs a module-level function on both ranks at once: `function(ranks, *arguments)`; returns both results."""

    def __init__(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "torch.distributed.fsdp"])
        self._pipes, self._processes = [], []
        address = ""
        for rank in range(N_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, address), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            if rank == 0:
                address = self._receive(0)
        for rank in range(N_RANKS):
            assert self._receive(rank) == "ready"

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(DEADLINE_SECONDS), f"rank {rank} did not answer"
        return self._pipes[rank].recv()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Both ranks' results. Raises AssertionError with the rank's traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(rank) for rank in range(N_RANKS)]
        for rank, (well, result) in enumerate(answers):
            assert well, f"rank {rank}:\n{result}"
        return [result for _, result in answers]

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
