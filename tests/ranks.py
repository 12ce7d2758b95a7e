"""Rank processes that many tests share, with gloo groups between the ranks."""

import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.preloaded import CONTEXT

DEADLINE_SECONDS = 60.0
joined: list[Any] = []  # in a rank process: its Collectives


def _serve(pipe: Connection, place: tuple[int, int, float], layouts: Sequence[Layout], address: str) -> None:
    """A rank, its number, theirs and their deadline: join the group, then run what comes, until None."""
    import torch

    from realgraph.runtime.parallel.groups import Collectives, Member
    from realgraph.runtime.parallel.rendezvous import FileRendezvous, reach_store

    torch.set_num_threads(1)
    rank, n_ranks, seconds = place
    rendezvous = FileRendezvous() if rank == 0 else None
    if rendezvous is not None:
        address = rendezvous.address
        pipe.send(address)
    store = reach_store(address, n_ranks, seconds)
    member = Member(rank, n_ranks, torch.device("cpu"), seconds)
    whole = Layout(DeviceMesh(0, n_ranks), dp=n_ranks)
    groups = Collectives(member, store, [whole, *layouts])
    joined.append(groups)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send((True, function(groups.of_layout(whole), *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    groups.close()
    if rendezvous is not None:
        rendezvous.close()


class RankProcesses:
    """Runs a module-level function on all ranks at once: `function(ranks, *arguments)`, where `ranks` are all of them
    as data-parallel ones; returns their results. Groups of other layouts: `joined[0].of_layout`."""

    def __init__(self, n_ranks: int = 2, layouts: Sequence[Layout] = (), seconds: float = DEADLINE_SECONDS) -> None:
        self._patience = max(DEADLINE_SECONDS, seconds)
        self._pipes, self._processes = [], []
        address = ""
        for rank in range(n_ranks):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(theirs, (rank, n_ranks, seconds), layouts, address), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            if rank == 0:
                address = self._receive(0)
        for rank in range(n_ranks):
            assert self._receive(rank) == "ready"

    def _receive(self, rank: int) -> Any:
        assert self._pipes[rank].poll(self._patience), f"rank {rank} did not answer"
        return self._pipes[rank].recv()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Every rank's result. Raises AssertionError with the rank's traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(rank) for rank in range(len(self._pipes))]
        for rank, (well, result) in enumerate(answers):
            assert well, f"rank {rank}:\n{result}"
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
