"""Rank processes that many tests share, with groups between the ranks: gloo, and NCCL where each has a GPU."""

import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.preloaded import CONTEXT

DEADLINE_SECONDS = 60.0
SLACK_SECONDS = 30.0  # for a rank to say that its deadline has passed
joined: list[Any] = []  # in a rank process: its Collectives


def _serve(pipe: Connection, place: tuple[int, int, float, str], layouts: Sequence[Layout], address: str) -> None:
    """A rank; place: its number, theirs, their deadline, kind of device. Join the group, run what comes until None."""
    import torch

    from realgraph.runtime.parallel.collectives.rendezvous import FileRendezvous, reach_store
    from realgraph.runtime.parallel.groups import Collectives, Member

    torch.set_num_threads(1)
    rank, n_ranks, seconds, kind = place
    rendezvous = FileRendezvous() if rank == 0 else None
    if rendezvous is not None:
        address = rendezvous.address
        pipe.send(address)
    store = reach_store(address, n_ranks, seconds)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    member = Member(rank, n_ranks, device, seconds)
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
    as data-parallel ones; returns their results. Groups of other layouts: `joined[0].of_layout`.

    A rank that does not answer, or answers with an error, fails its test alone: the next one has new processes, as a
    collective that was left unfinished would be taken for one of theirs.
    """

    def __init__(
        self, n_ranks: int = 2, layouts: Sequence[Layout] = (), seconds: float = DEADLINE_SECONDS, kind: str = "cpu"
    ) -> None:
        """kind: of the ranks' devices, `cpu` or `cuda`."""
        self._n_ranks, self._layouts, self._seconds, self._kind = n_ranks, tuple(layouts), seconds, kind
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._is_whole = False  # every rank has answered the last task, and without an error
        self._start()

    def _start(self) -> None:
        try:
            address = ""
            for rank in range(self._n_ranks):
                self._start_rank(rank, address)
                if rank == 0:
                    address = self._receive(0)
            assert [self._receive(rank) for rank in range(self._n_ranks)] == ["ready"] * self._n_ranks
        except BaseException:
            self._kill()
            raise

    def _start_rank(self, rank: int, address: str) -> None:
        ours, theirs = CONTEXT.Pipe()
        place = (rank, self._n_ranks, self._seconds, self._kind)
        process = CONTEXT.Process(target=_serve, args=(theirs, place, self._layouts, address), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def _receive(self, rank: int) -> Any:
        """Its next message. Raises AssertionError where it sends nothing for longer than its own deadline, EOFError or
        ConnectionResetError where it has ended."""
        patience = max(DEADLINE_SECONDS, self._seconds) + SLACK_SECONDS
        self._is_whole = False
        assert self._pipes[rank].poll(patience), f"rank {rank} has not answered in {patience:g} s"
        answer = self._pipes[rank].recv()
        self._is_whole = True
        return answer

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Every rank's result. Raises AssertionError with the rank's traceback."""
        if not self._is_whole:
            self._kill()
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(rank) for rank in range(self._n_ranks)]
        self._is_whole = all(well for well, _ in answers)
        for rank, (well, result) in enumerate(answers):
            assert well, f"rank {rank}:\n{result}"
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes."""
        if self._is_whole:
            for pipe in self._pipes:
                pipe.send(None)
            for process in self._processes:
                process.join(10)
        self._kill()

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(10)
        self._pipes, self._processes = [], []
