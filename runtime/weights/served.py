"""Updates of the SGLang servers of a generate call, as one worker takes part in them.

By disk each server's worker gathers the whole weights, and the server reads them. By broadcast the first of the workers
that train gathers them, once for all servers, and sends them; a server that fails in it reads them where that worker
has them. The plan says which. Broadcasts between GPUs need one NCCL on both ends.
"""

import logging
import subprocess
import sys
from pathlib import Path

from torch import Tensor

from realgraph.planner.plan.axes import head_worker
from realgraph.planner.plan.layout import Layout
from realgraph.runtime.engine import Parts, TrainEngine
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.models.weights import resolve
from realgraph.runtime.parallel.groups import Collectives
from realgraph.runtime.rollout.engine import SglangEngine
from realgraph.runtime.rollout.weights.agreement import UpdateWords
from realgraph.runtime.rollout.weights.broadcast import (
    DONE,
    STAGED,
    BackendName,
    Broadcast,
    Broadcaster,
    Servers,
    buckets_of,
)
from realgraph.runtime.rollout.weights.staged import StagedWeights, checksums_of
from realgraph.runtime.store.mail import Mail
from realgraph.runtime.weights.movement import Between, Movement, role_path
from realgraph.runtime.weights.server_checksums import ChecksumComparison
from realgraph.runtime.wire.metrics import ArrivedBytes
from realgraph.runtime.wire.protocol import Reallocate

log = logging.getLogger(__name__)

NCCL_SECONDS = 120.0  # for an interpreter to import torch and say its NCCL
_NCCL = "import torch; print(*torch.cuda.nccl.version(), sep='.')"


class ServedCall:
    """The servers of one generate call. The workers that train its role, and those that its servers are beside, make it
    and use it alike. trained: the layout of the trained weights. mail: knows which workers are gone."""

    def __init__(
        self, job: Job, call: str, trained: Layout, collectives: Collectives, movement: Movement, mail: Mail
    ) -> None:
        self._job, self._call, self._trained, self._movement = job, call, trained, movement
        self._role, self._member = job.graph.role(call), collectives.member
        self._layout = layout = job.plan.allocations[call].layout
        self._heads = tuple(head_worker(layout, rank) for rank in range(layout.dp))  # each has a server
        self._servers = Servers(self._heads, layout.mesh.n_devices // layout.dp)
        self._place = self._heads.index(self._member.worker) if self._member.worker in self._heads else None
        self._leader = trained.mesh.first  # of broadcasts
        seconds = job.runtime.start_seconds + job.runtime.min_deadline_seconds  # a server that has died starts anew
        self._words = UpdateWords(collectives.store, call, seconds, mail.is_gone)
        self._backend: BackendName = "nccl" if collectives.member.device.type == "cuda" else "gloo"
        self._broadcasts = job.plan.reallocation_transport.get(call) == "device"
        self._update = 0
        self._checksums = (
            ChecksumComparison(self._words, range(layout.dp), self._place) if self._place is not None else None
        )
        self._n_taken = 0  # updates of the server here
        self._staged: StagedWeights | None = None  # on the leader
        self._sender = Broadcaster(self._words, call, self._servers, collectives.member.device)

    def update(self, work: Reallocate, owner: TrainEngine | None, engine: SglangEngine | None) -> ArrivedBytes:
        """Bring the trained weights to the servers of the workers that receive them. owner: the engine here that has
        them. engine: over the server here. Returns what has come from other workers."""
        if not set(self._heads) <= set(work.receivers):
            return self._by_disk(work, owner, engine)
        self._update += 1
        if self._update == 1 and self._broadcasts and self._backend == "nccl":
            self._broadcasts = self._agrees_on_nccl()
        if self._broadcasts:
            arrived = self._broadcast(owner) if owner is not None else ArrivedBytes()
            if engine is not None:
                self._receive(work.version, engine)
            return arrived
        return self._by_disk(work, owner, engine)

    def _by_disk(self, work: Reallocate, owner: TrainEngine | None, engine: SglangEngine | None) -> ArrivedBytes:
        """All that a server needs comes to its worker, from which it reads it."""
        heads = tuple(head for head in self._heads if head in work.receivers)
        if self._member.worker not in heads:
            engine = None  # it keeps the weights that it has
        source = owner or engine
        if source is None:
            return ArrivedBytes()  # beside a server that another worker heads
        with self._movement.moved(self._between(heads), source) as moved:
            if engine is None:
                for _ in moved.parts:
                    pass  # only sends
            else:
                engine.prepare(moved.parts)
                engine.switch(work.version)
                self._verify(engine, broadcast=False, together=heads == self._heads)
                if moved.sums is not None:
                    moved.sums.count(engine.checksums())
        return moved.arrived

    def close(self) -> None:
        """Give up what was gathered."""
        if self._staged is not None:
            self._staged.remove()

    def _between(self, whole: tuple[int, ...]) -> Between:
        return Between(self._role, (self._trained, whole))

    # --- broadcasts ---------------------------------------------------------------------------------------------------

    def _broadcast(self, owner: TrainEngine) -> ArrivedBytes:
        """A trainer's part: all bring their parts to the leader, which sends them."""
        leads = self._member.worker == self._leader
        folder = Path()
        try:
            if leads and self._update > 1:
                self._sender.await_done(self._update - 1)  # older weights than those are nobody's any more
            with self._movement.moved(self._between((self._leader,)), owner) as moved:
                if leads:
                    folder, sums = self._gather(moved.parts, owner)
                    if moved.sums is not None:
                        moved.sums.count(sums)
                else:
                    for _ in moved.parts:
                        pass
        except Exception as error:
            self._words.fail(self._update, f"worker {self._member.worker}: {error}")
            raise
        if leads:
            self._sender.send(self._update, folder, owner.weight_specs())
        return moved.arrived

    def _gather(self, parts: Parts, owner: TrainEngine) -> tuple[Path, Tensor]:
        """The folder of the new weights, and their checksums. It and the one before are kept."""
        specs = owner.weight_specs()
        if self._staged is None:
            source = resolve(role_path(self._job.graph.models, self._role))
            links = RunFolder(Path(self._job.run_dir)).logs / f"sglang-weights-{self._call}-of-worker-{self._leader}"
            self._staged = StagedWeights(source, specs, links)
        self._staged.keep_newest()
        folder = self._staged.gather(parts)
        return folder, checksums_of(folder, specs)

    def _receive(self, version: int, engine: SglangEngine) -> None:
        """The part of a server's worker."""
        words, place = self._words, self._place
        assert place is not None, "a server is its head's"
        folder = Path(words.hear(self._update, STAGED))
        buckets = buckets_of(engine.weight_specs())
        engine.receive(folder, version, Broadcast(words, self._update, self._servers, place, self._backend, buckets))
        self._verify(engine, broadcast=words.failure(self._update) is None)
        words.post(self._update, f"{DONE}{place}")  # its folder may go

    def _verify(self, engine: SglangEngine, *, broadcast: bool, together: bool = True) -> None:
        """Compare what the server here holds at the updates that `runtime.verify_weights` names. Raises
        WeightsDiffer."""
        assert self._checksums is not None, "a server is its head's"
        self._n_taken += 1
        if self._job.runtime.verifies(self._n_taken):
            self._checksums.compare(engine, broadcast=broadcast, together=together)

    def _agrees_on_nccl(self) -> bool:
        """Both ends have one NCCL, as the others of different versions do not understand each other. A worker that has
        ended is not asked."""
        words, worker = self._words, self._member.worker
        if worker == self._leader:
            words.post(0, "trainer", nccl_of(sys.executable))
        if worker in self._heads:
            assert self._job.rollout.python is not None, "only servers that are started take broadcasts"
            words.post(0, f"server/{worker}", nccl_of(self._job.rollout.python))
        ours = words.hear(0, "trainer")
        theirs = set(words.hear_those(0, {head: f"server/{head}" for head in self._heads}))
        if theirs <= {ours}:
            return True
        others = ", ".join(sorted(theirs))
        log.warning("servers of %r read their weights from disk: their NCCL is %s, ours %s", self._call, others, ours)
        return False


def nccl_of(python: str) -> str:
    """The version of an interpreter's NCCL. Raises CalledProcessError, TimeoutExpired."""
    asked = subprocess.run([python, "-c", _NCCL], capture_output=True, text=True, timeout=NCCL_SECONDS, check=True)
    return asked.stdout.strip()
