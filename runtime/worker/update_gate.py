"""After a weight update has reached the generator: do generator and trainer still agree about the model? Worker side.

A train call sees it for nothing in the samples of its own version (`TrainEngine`). Where there may be none, since
generation runs ahead of training or the loss reads no behaviour log-probabilities, the generator draws a few tokens
under the weights that it has just got, and the trainer, which stands at the same version, recomputes them. Where new
weights come to a stream while it generates, the trainer does so before its next optimizer step or checkpoint, and waits
no earlier.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, ROUTES
from realgraph.graphs.spec import Generate, Train
from realgraph.runtime.batch import Packed
from realgraph.runtime.data.stops import Stops
from realgraph.runtime.engine import TrainEngine
from realgraph.runtime.generate.rollouts import Rollouts
from realgraph.runtime.job.engine_loss import expendable_workers
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.sample_ids import sample_seed
from realgraph.runtime.logprob_gap import EngineGap, check_engines, engine_name, logprob_limit, worst_of
from realgraph.runtime.parallel.collectives.peers import naming
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.wire.metrics import Max, Metric
from realgraph.runtime.wire.protocol import Reallocate
from realgraph.runtime.worker.roles import Roles

PROBE_SAMPLES, PROBE_NEW_TOKENS, PROBE_PROMPT_TOKENS = 4, 8, 256  # of a probe, at most: far below what any batch has


PROBE_TAG = 1  # of messages with probes, plus the call's place: others between the same workers may overtake them


@dataclass(frozen=True)
class GateProbe:
    """Samples of one prompt by one engine. routes: where the role replays the experts that generation chose."""

    tokens: Tensor  # [PROBE_SAMPLES, prompt + new] int64
    logprobs: Tensor  # [PROBE_SAMPLES, new] float64, as drawn
    engine: str  # as errors name it
    version: int  # of the weights that drew them
    routes: Tensor | None = None  # [PROBE_SAMPLES, prompt + new, layers of experts, experts a token]

    def packed(self) -> Tensor:
        """[n] float64, for messages: its sizes, then all of it."""
        routes = torch.zeros((0, 0, 0, 0)) if self.routes is None else self.routes
        name = torch.tensor(list(self.engine.encode()))
        sizes = torch.tensor([self.version, len(name), self.tokens.shape[1], self.logprobs.shape[1], *routes.shape[2:]])
        return torch.cat([part.flatten().double() for part in (sizes, name, self.tokens, self.logprobs, routes)])


def unpacked(flat: Tensor) -> list[GateProbe]:
    """The probes whose `packed` lie one after the other in `flat`, on the CPU."""
    probes, flat = list[GateProbe](), flat.cpu()
    while len(flat):
        version, n_name, length, n_new, layers, top_k = (int(size) for size in flat[:6])
        shapes = [(length,), (n_new,), (length, layers, top_k)]
        counts = [n_name, *(PROBE_SAMPLES * math.prod(shape) for shape in shapes)]
        name, *parts, flat = torch.split(flat[6:], [*counts, len(flat) - 6 - sum(counts)])
        tokens, logprobs, routes = (part.view(PROBE_SAMPLES, *shape) for part, shape in zip(parts, shapes, strict=True))
        engine = bytes(int(byte) for byte in name).decode()
        probes.append(GateProbe(tokens.long(), logprobs, engine, version, routes.int() if layers else None))
    return probes


def shared(probes: Sequence[GateProbe], ranks: Ranks) -> list[GateProbe]:
    """The probes of all ranks, on each of them: the workers of a data-parallel rank pass the same samples."""
    if ranks.size == 1:
        return list(probes)
    empty = torch.zeros(0, dtype=torch.float64)
    own = torch.cat([empty, *(probe.packed() for probe in probes)]).to(ranks.device)
    counts = ranks.gather_rows(torch.tensor([len(own)], device=ranks.device)).tolist()
    padded = own.new_zeros(max(counts))
    padded[: len(own)] = own
    rows = zip(ranks.gather_rows(padded[None]), counts, strict=True)
    return [probe for row, count in rows for probe in unpacked(row[:count])]


def _bytes(probe: GateProbe | None) -> bytes:
    """A probe as it is mailed; b"" for none."""
    return b"" if probe is None else probe.packed().cpu().numpy().tobytes()


class _Awaited(NamedTuple):
    """Probes that a trainer has yet to look at: its own, and workers that send it theirs."""

    probes: list[GateProbe]
    senders: tuple[tuple[int, int], ...]  # worker, number of its process there: from 1 on in no process group


class UpdateGate:
    """The gate of one worker for one generate call. Every worker of a reallocation calls it alike, after it."""

    def __init__(self, job: Job, roles: Roles, rollouts: Mapping[str, Rollouts], worker: int, call: str) -> None:
        self._job, self._roles, self._rollouts, self._worker = job, roles, rollouts.get(call), worker
        generate = job.graph.calls[call]
        assert isinstance(generate, Generate)
        self._call, self._role = call, generate.model
        self._temperature = generate.temperature or 1.0
        graph = job.graph
        trains = [n for n, call in graph.calls.items() if isinstance(call, Train) and call.model == self._role]
        # the first call of a step alone has samples of its version
        first = [n for n in trains[:1] if graph.sampler(n) == self._call]
        reads = {graph.plain(n, key) for n in first for key in graph.reads[n]}
        seen = BEHAVIOUR_LOGPROBS in reads
        self._needed = bool(trains) and (job.plan.staleness > 0 or not seen)
        self._tag, self._subject = PROBE_TAG + graph.generates.index(self._call), f"probe of {self._call}"
        self._awaited: _Awaited | None = None
        self._expendable = expendable_workers(job.graph, job.plan)
        self._sent: list[tuple[Tensor, dist.Work | None]] = []  # probes, which live until they have arrived

    def after_training(self, role: str) -> dict[str, Metric]:
        """Metrics of the gate where the generator reads the trained weights in place. Raises LogprobGap."""
        engine = self._roles.trained[role]
        if not self._needed or role != self._role or not self._roles.reads_in_place(self._call, engine):
            return {}
        probe = self._draw()
        return self._compare(engine, [probe] if probe is not None else [])

    def after_reallocation(self, work: Reallocate) -> dict[str, Metric]:
        """Owners of the trained weights compare their own probes; the first also those of workers that own no part. For
        a stream that goes on meanwhile `settle` does so later.

        Collective where the weights are sharded. Raises LogprobGap.
        """
        call, owners, receivers = work.call, work.owners, work.receivers
        if not self._needed or call != self._call:
            return {}
        probe = self._draw() if self._worker in receivers else None
        later, mail = self._roles.updates_beside(call), self._roles.handover.mail
        if self._worker in work.joined:
            mail.send(owners[0], self._subject, _bytes(probe))
            return {}
        if self._worker not in owners:
            self._send(probe, owners[0])
            if not later:
                self._arrive()
            return {}
        senders = [worker for worker in receivers if worker not in owners and self._worker == owners[0]]
        others = tuple([(worker, work.joined.get(worker, 0)) for worker in senders])
        before = self._awaited or _Awaited([], ())  # of other engines, under the same weights
        probes = [*before.probes, *([] if probe is None else [probe])]
        self._awaited = _Awaited(probes, before.senders + others)
        return {} if later else self.settle(self._role)

    def settle(self, role: str) -> dict[str, Metric]:
        """Before the weights of `role` change or are saved: compare what has been drawn under them. Raises LogprobGap,
        CollectiveError with the worker whose probe does not come. Collective like `after_reallocation`."""
        awaited = self._awaited
        if awaited is None or role != self._role:
            return {}
        self._awaited, engine = None, self._roles.trained[role]
        others = [one for sender in awaited.senders for one in self._probes_of(engine.device, *sender)]
        return self._compare(engine, awaited.probes + others)

    def _draw(self) -> GateProbe | None:
        """By the generator, for the newest prompt that it was given; None before the first, and on workers that only
        follow the head of their replica."""
        engine = self._roles.rollouts.get(self._call)
        if engine is None:
            return None
        if self._rollouts is None:
            engine.follow()
            return None
        try:
            return self._drawn(self._rollouts)
        finally:
            engine.dismiss()

    def _drawn(self, rollouts: Rollouts) -> GateProbe | None:
        if not rollouts.newest_prompt:
            return None
        prompt = rollouts.newest_prompt[-PROBE_PROMPT_TOKENS:]
        n_new = min(PROBE_NEW_TOKENS, rollouts.sampling.max_new_tokens)
        plain = rollouts.sampling.at(PROBE_SAMPLES, self._temperature)
        sampling = replace(plain, max_new_tokens=n_new, stops=Stops())
        version = rollouts.engine.version
        done = rollouts.complete([sampling.request(i, prompt, sample_seed(version, i)) for i in range(PROBE_SAMPLES)])
        routes = [one.routes for one in done if one.routes is not None]
        return GateProbe(
            torch.tensor([[*prompt, *one.tokens] for one in done]),
            torch.tensor([one.logprobs for one in done], dtype=torch.float64),
            engine_name(self._worker, rollouts.engine.status().address),
            version,
            torch.stack(routes) if routes else None,
        )

    def _send(self, probe: GateProbe | None, owner: int) -> None:
        self._arrive()
        device = self._roles.device
        flat = torch.zeros(0, dtype=torch.float64) if probe is None else probe.packed()
        parts = [torch.tensor([len(flat)], device=device), *([flat.to(device)] if probe is not None else [])]
        with naming(owner):
            self._sent = [(part, dist.isend(part, owner, tag=self._tag)) for part in parts]

    def _arrive(self) -> None:
        """Wait until what was sent has arrived."""
        for _, work in self._sent:
            assert work is not None, "the default group has all workers"
            work.wait()
        self._sent = []

    def _receive(self, device: torch.device, worker: int) -> list[GateProbe]:
        size = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            with naming(worker):
                dist.recv(size, worker, tag=self._tag)
                flat = torch.zeros(int(size), dtype=torch.float64, device=device)
                if len(flat):
                    dist.recv(flat, worker, tag=self._tag)
        except CollectiveError:
            if worker not in self._expendable:
                raise
            return []  # it is gone, and the run goes on without it
        return unpacked(flat)

    def _probes_of(self, device: torch.device, worker: int, process: int) -> list[GateProbe]:
        """The probe of another worker; none where it is gone, and the run goes on without it."""
        if not process:
            return self._receive(device, worker)
        data = self._roles.handover.mail.wait(worker, self._subject, process)
        return unpacked(torch.frombuffer(bytearray(data), dtype=torch.float64)) if data else []

    def _compare(self, engine: TrainEngine, probes: list[GateProbe]) -> dict[str, Metric]:
        """The gap of the worst engine as a metric. Called by all ranks where the weights are divided, with probes or
        without."""
        for ranks in self._roles.sharing_ranks(self._role):
            probes = shared(probes, ranks)
        gaps = engine_gaps(engine, probes, self._temperature)
        if not gaps:
            return {}
        limit = logprob_limit(self._job, self._role)
        when = f"after the weight update of step {engine.step - 1}"
        check_engines(gaps, limit, when, self._temperature, agreed=engine.gate_passed)
        engine.gate_passed = True
        return {"update_gap": Max(worst_of(gaps).gap)}


def engine_gaps(trainer: TrainEngine, probes: Sequence[GateProbe], temperature: float) -> list[EngineGap]:
    """The gap of each engine with probes, which the trainer recomputes in one pass; it makes that without any, too:
    where its weights are divided all ranks do."""
    lengths = tuple(probe.tokens.shape[1] for probe in probes for _ in range(PROBE_SAMPLES))
    tokens = torch.cat([torch.zeros(0, dtype=torch.int64), *(probe.tokens.flatten() for probe in probes)])
    routes = [probe.routes.flatten(0, 1) for probe in probes if probe.routes is not None]
    keys = {ROUTES: torch.cat(routes)} if routes else {}
    batch = Packed(tokens, lengths, torch.ones_like(tokens, dtype=torch.bool), token_keys=keys)
    logprobs = trainer.inference(batch, "logprobs", temperature).double()
    drawn = dict[tuple[str, int], list[Tensor]]()  # engine, version -> log-probabilities as drawn and recomputed
    start = 0
    for probe in probes:
        end = start + probe.tokens.numel()
        recomputed = logprobs[start:end].view_as(probe.tokens)[:, -probe.logprobs.shape[1] :]
        drawn.setdefault((probe.engine, probe.version), []).append(torch.stack([probe.logprobs, recomputed]).flatten(1))
        start = end
    found = {name: torch.cat(pairs, dim=1) for name, pairs in drawn.items()}
    return [
        EngineGap(*name, float((pair[0] - pair[1]).abs().mean()), *pair.mean(1).tolist())
        for name, pair in found.items()
    ]
