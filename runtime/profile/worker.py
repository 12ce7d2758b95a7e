"""One worker of `realgraph profile`: measures kernels, collectives and the engines on its device, together with all
other workers. Worker side.

Every case starts at a barrier, so that the devices of a CPU, which share its cores and memory, are all busy at once: so
they will be in a run. A task and its results are files in the folder of the worker's log.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from realgraph.planner.costs.calibrate.measurements import (
    AttentionCase,
    Case,
    Collective,
    DecodeCase,
    DeviceCopy,
    Gemm,
    HostLink,
    Measured,
    Pass,
    ProfileTask,
    RolloutCase,
)
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.models.building import DTYPES
from realgraph.runtime.parallel.groups import Collectives, Member
from realgraph.runtime.processes.launcher import WorkerBoot
from realgraph.runtime.profile.engines import EngineCase, ProfiledEngines
from realgraph.runtime.profile.files import read_task, rendezvous_file, write_points
from realgraph.runtime.profile.kernels import collective, kernel
from realgraph.runtime.worker.resources import pick_device

DEADLINE_SECONDS = 120.0  # of one case: the others wait that long for a worker
KERNEL_SECONDS = 0.02  # of repeats of one small case in a round
MAX_REPEATS = 20
STEADY_CHANGE, STEADY_ROUNDS = 0.05, 3  # relative; of the last rounds


def main(boot: WorkerBoot) -> None:
    """The worker's process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder = Path(boot.log).parent
    task = read_task(folder)
    device = torch.device("cpu") if task.cluster.is_cpu else pick_device(boot.worker)
    store = FileStore(str(rendezvous_file(folder)), boot.n_workers) if boot.n_workers > 1 else None
    member = Member(boot.worker, boot.n_workers, device, DEADLINE_SECONDS)
    collectives = Collectives(member, store, _layouts(task, boot.n_workers))
    points = Bench(task, collectives, folder).run()
    write_points(points, folder, boot.worker)
    collectives.close()
    sys.exit(0)


def _layouts(task: ProfileTask, n_workers: int) -> set[Layout]:
    """All blocks of every size that is asked for, and all workers."""
    sizes = {case.ranks for case in task.cases if isinstance(case, Collective)} | {n_workers}
    return {Layout(DeviceMesh(first, size), dp=size) for size in sizes for first in range(0, n_workers, size)}


class Bench:
    """The cases of one task on one worker."""

    def __init__(self, task: ProfileTask, collectives: Collectives, folder: Path) -> None:
        self._task, self._collectives = task, collectives
        self._device = collectives.member.device
        self._all = collectives.ranks(DeviceMesh(0, collectives.member.n_workers))
        whole = Layout(DeviceMesh(0, self._all.size), dp=self._all.size)
        self._engines = ProfiledEngines(task.dtype, collectives.of_layout(whole), folder)

    def run(self) -> list[Measured]:
        """Round by round, so that what disturbs the machine for a while disturbs all cases alike; the first round
        warms up and is left out. On a busy machine there are more rounds, until the least seconds fall no more."""
        began = time.monotonic()
        seconds: list[list[float]] = [[] for _ in self._task.cases]
        runs = [self._prepare(case) for case in self._task.cases]
        for number in count():
            for case, run, found in zip(self._task.cases, runs, seconds, strict=True):
                least = self._measure(run, isinstance(case, EngineCase))
                if number:
                    found.append(least)
            if number and self._enough(seconds, time.monotonic() - began):
                break
        return [_measured(case, found) for case, found in zip(self._task.cases, seconds, strict=True)]

    def _enough(self, found: Sequence[Sequence[float]], seconds: float) -> bool:
        """True where the time is up, or all rounds are done and no case still falls; all workers say the same."""
        falls = len(found[0]) < self._task.rounds or any(still_falls(one) for one in found)
        slowest = self._all.collect(torch.tensor([seconds, float(falls)])).amax(0)
        return bool(slowest[0] > self._task.budget_seconds) or not bool(slowest[1])

    def _prepare(self, case: Case) -> Callable[[], float]:
        """A function that runs the case once and returns its seconds."""
        match case:
            case Collective():
                first = self._collectives.member.worker // case.ranks * case.ranks
                ranks = self._collectives.ranks(DeviceMesh(first, case.ranks))
                return self._timed(collective(case, ranks))
            case Gemm() | AttentionCase() | DeviceCopy() | HostLink():
                return self._timed(kernel(case, self._device, DTYPES[self._task.dtype]))
            case Pass() | DecodeCase() | RolloutCase():
                return self._engines.prepare(case)

    def _timed(self, run: Callable[[], object]) -> Callable[[], float]:
        cuda = self._device.type == "cuda"

        def timed() -> float:
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter() - began

        return timed

    def _measure(self, run: Callable[[], float], once: bool) -> float:
        """Least seconds of a few repeats that begin on all workers at once; collectives and engines repeat alike."""
        self._all.barrier()
        rounds = [run()]
        if once:
            return rounds[0]
        repeats = min(MAX_REPEATS, max(1, int(KERNEL_SECONDS / max(rounds[0], 1e-6))))
        repeats = int(self._all.collect(torch.tensor([repeats])).min())
        rounds += [run() for _ in range(repeats)]
        return min(rounds)


def still_falls(seconds: Sequence[float]) -> bool:
    """True where the last rounds have brought the least seconds down by more than next to nothing."""
    before = seconds[:-STEADY_ROUNDS]
    return bool(before) and min(seconds) < (1 - STEADY_CHANGE) * min(before)


def _measured(case: Case, seconds: Sequence[float]) -> Measured:
    ordered = sorted(seconds)
    least, median = ordered[0], ordered[len(ordered) // 2]
    return Measured(case, least, (median - least) / least if least > 0 else 0.0, len(ordered))
