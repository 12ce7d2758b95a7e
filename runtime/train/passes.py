"""Forward and backward passes of one role on one rank: cuts, denominators, accumulation, reduction. Takes no decision.

Losses carry global denominators, so gradients only ever add: over micro-batches here, over data-parallel and
context-parallel ranks in one flat all-reduce (replicated) or in FSDP's reduce-scatter. Tensor-parallel and
context-parallel ranks make the same passes over the same samples, and know the same losses; of pipeline stages only the
last has any. The plan's tokens of a micro-batch are a device's: a context-parallel group takes as many times more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from realgraph.graphs.keys import ROUTES, VERSIONS
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import ModelRole, Train
from realgraph.runtime.algorithms import losses
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.engine import TrainSettings
from realgraph.runtime.job.sample_ids import group_of, row_held_out
from realgraph.runtime.models.building import DTYPES
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.parallel.experts.routing import record_of
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.parallel.pipeline.stage import stage_of
from realgraph.runtime.train.audit import seen_of
from realgraph.runtime.train.errors import NumericsError
from realgraph.runtime.train.microbatch import cut, idle, rejoin, units
from realgraph.runtime.train.observed import Aim, gap_sums, observed
from realgraph.runtime.train.optimizer import Masters
from realgraph.runtime.train.staged import Judged, PackedMicroBatch, StagedModel
from realgraph.runtime.wire.metrics import Mean, Metric, merge

PROXIMAL_LOGPROBS = "proximal_logprobs"
AGES_COUNTED = 16  # steps, up to which the tokens of each age are counted
_NORM_CHUNK_ELEMENTS = 1024


@dataclass(frozen=True)
class StepShare:
    """This rank's share of one optimizer step: its samples with work to do, how they are cut, and the whole step's
    denominator. n_passes: as many as every other rank makes, where they have to be equal.

    sizes: tokens, samples, sampled tokens, and those of them within the age bound, before idle samples were left out.
    n_counted: what has a part in the loss on any rank: sampled tokens, or samples where the loss is of whole scores.
    idle: what idle samples would add to the denominator of this rank. ages: sampled tokens by their age in steps, from
    0 to `counted_ages` (AGES_COUNTED at most), and all older ones; none where none are to be counted.
    """

    batch: Packed
    cuts: list[tuple[int, ...]]
    n_passes: int
    denominator: Tensor
    sizes: tuple[int, int, int, int]
    n_counted: float
    idle: float = 0.0
    ages: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing has a part in the loss, on all ranks alike: it is 0 over 0, and no reason to move the weights."""
        return self.n_counted == 0 or float(self.denominator) == 0


@dataclass
class PassTotals:
    """The sums of one optimizer step's passes on this rank. expert_load: [n] float64, see `RoutingRecord.load`; empty
    for a model without experts. gaps: see `gap_sums`. blamed: samples with outputs that are not finite."""

    loss: float = 0.0
    expert_load: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    gaps: Tensor = field(default_factory=lambda: torch.zeros(0, 4, dtype=torch.float64))
    metrics: dict[str, Metric] = field(default_factory=dict)
    blamed: tuple[int, ...] = ()

    @property
    def gap(self) -> Mean:
        """Between generator and trainer, of the tokens seen here."""
        gap = self.metrics.get("logprob_gap")
        return gap if isinstance(gap, Mean) else Mean(0.0, 0.0)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge metrics."""
        merge(self.metrics, metrics)

    def take(self, loss: float, batch: Packed, outputs: Outputs) -> None:
        """Add a micro-batch's loss."""
        self.loss += loss
        if not math.isfinite(loss):
            self.blamed += _blame(batch, outputs)


class ModelPasses:
    """A role's model on one rank, with its ranks and, where it is trained, its masters."""

    def __init__(self, role: ModelRole, model: PackedModel, ranks: LayoutRanks, settings: TrainSettings) -> None:
        self.role = role
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.sharded = isinstance(model, FSDPModule)
        # data-parallel ranks make equal numbers of passes: each pass of one has collectives with the others
        self.in_step = self.sharded or bool(ranks.tp.size * ranks.cp.size % ranks.ep.size)
        limit = settings.max_tokens_per_microbatch
        self._most_tokens = None if limit is None else limit * ranks.cp.size  # of a micro-batch
        self.dtype = DTYPES[role.dtype]
        stage = stage_of(model.network)
        self.pipe = None if stage is None else stage.pipe
        self.staged = None if stage is None else StagedModel(model, stage, self.dtype)

    @torch.no_grad()
    def inference(self, batch: Packed, wants: Wants) -> Tensor:
        """[T] for logprobs and values, [N] for scores, in the batch's order, on the device.

        wants.where: [T] of the whole batch, or None.
        """
        cuts = cut(batch, self._most_tokens)
        n_passes = int(self.ranks.dp.collect(torch.tensor([len(cuts)])).max()) if self.in_step else len(cuts)
        whole = batch if wants.where is None else replace(batch, mask=wants.where)
        work = [self._microbatch(whole.select(samples), wants) for samples in cuts]
        work += [PackedMicroBatch(self._dummy(), replace(wants, where=None), dummy=True)] * (n_passes - len(cuts))
        found = self._outputs(work)
        if not cuts:
            return torch.zeros(0, device=self.ranks.device)
        values = [_of(outputs, wants.output) for outputs in found[: len(cuts)]]
        if values:
            joined = torch.cat(rejoin(cuts, values, None if wants.output == "scores" else batch.lengths))
        else:
            n, wide = batch.n_samples if wants.output == "scores" else batch.n_tokens, torch.float32
            joined = torch.empty(n, dtype=torch.promote_types(self.dtype, wide), device=self.ranks.device)
        return self.ranks.pp.broadcast(joined, self.ranks.pp.size - 1)

    def _outputs(self, work: Sequence[PackedMicroBatch]) -> list[Outputs]:
        """The outputs of all micro-batches; none on stages before the last."""
        if self.staged is not None:
            return self.staged.infer(work)
        return [self.model.run(one.batch, one.wants) for one in work]

    def _microbatch(self, batch: Packed, wants: Wants) -> PackedMicroBatch:
        """On the device; of an output that is wanted of some tokens only, of those that the mask has; with the experts
        that the batch gives."""
        batch = batch.to(self.ranks.device)
        where = None if wants.where is None else batch.mask
        return PackedMicroBatch(batch, replace(wants, where=where, routes=batch.token_keys.get(ROUTES)))

    def _dummy(self) -> Packed:
        """Two tokens of no weight: a pass that only keeps the collectives of data-parallel ranks in step."""
        zeros = torch.zeros(2, dtype=torch.int64, device=self.ranks.device)
        return Packed(zeros, (2,), zeros.bool())

    def parts(self, loss: Loss, minibatches: Sequence[Packed], version: int) -> list[StepShare]:
        """Each mini-batch's work, cut and denominator; one collective for all of them. version: of the weights."""
        if not minibatches:
            raise ValueError("train was called without a mini-batch")
        drafts = [self._draft(loss, batch, version) for batch in minibatches]
        shares = [(float(draft.denominator), draft.n_counted, float(draft.n_passes)) for draft in drafts]
        totals = self.ranks.dp.collect(torch.tensor(shares, dtype=torch.float64)).view(-1, len(drafts), 3)
        denominators, counted, passes = (
            totals[:, :, 0].sum(0),
            totals[:, :, 1].sum(0),
            totals[:, :, 2].amax(0).to(torch.int64),
        )
        return [
            replace(
                draft,
                denominator=denominators[i].to(self.ranks.device),
                n_counted=float(counted[i]),
                n_passes=int(passes[i]) if self.in_step else draft.n_passes,
            )
            for i, draft in enumerate(drafts)
        ]

    def _draft(self, loss: Loss, batch: Packed, version: int) -> StepShare:
        """This rank's share of a mini-batch, with its own denominator and passes only."""
        fresh = self._fresh(loss, batch, version)
        share = losses.denominator(loss, fresh) if fresh.n_samples else torch.zeros(())
        busy = list(range(fresh.n_samples))
        if self.settings.skip_idle and busy:
            busy = (~idle(loss, fresh)).nonzero().squeeze(-1).tolist()
        work = fresh if len(busy) == fresh.n_samples else fresh.select(busy)
        cuts = cut(work, self._most_tokens, loss.needs_whole_groups)
        n_sampled, n_fresh = int(batch.mask.sum()), int(fresh.mask.sum())
        sizes = (batch.n_tokens, fresh.n_samples, n_sampled, n_fresh)
        left_out = float(share - losses.denominator(loss, work)) if work is not fresh else 0.0
        n_counted = fresh.n_samples if losses.needs(loss).scores else n_fresh
        n_passes = len(cuts) if self.pipe is None else self.pipe.rounded(len(cuts))
        ages = self._counted_ages(batch, version)
        return StepShare(work, cuts, n_passes, share, sizes, float(n_counted), left_out, ages)

    def _fresh(self, loss: Loss, batch: Packed, version: int) -> Packed:
        """The batch without what is over the age bound: its tokens masked, or in a loss that compares whole samples of
        a group, the groups that have such tokens left out."""
        ages, max_age = self._ages(batch, version), self.settings.max_age
        if ages is None or max_age is None:
            return batch
        overdue = batch.mask & (ages > max_age)
        if not loss.needs_whole_groups:
            return replace(batch, mask=batch.mask & ~overdue)
        late = set(batch.sample_index()[overdue].tolist())
        return batch.select([i for unit in units(batch, True) if late.isdisjoint(unit) for i in unit])

    def _ages(self, batch: Packed, version: int) -> Tensor | None:
        """[T]: steps from the one whose weights drew each token to the one that trains it; None where none can be."""
        settings = self.settings
        if (settings.max_age is None and settings.counted_ages is None) or VERSIONS not in batch.token_keys:
            return None
        drawn_in = torch.div(batch.token_keys[VERSIONS], settings.generator_trains, rounding_mode="floor")
        return version // settings.trains - drawn_in

    def _counted_ages(self, batch: Packed, version: int) -> tuple[int, ...]:
        """See StepShare; of ranks without a sample, too."""
        ages, most = self._ages(batch, version), self.settings.counted_ages
        if most is None:
            return ()
        return _counts_of(batch.tokens[:0] if ages is None else ages[batch.mask], min(most, AGES_COUNTED))

    def with_proximal(self, parts: Sequence[StepShare], temperature: float) -> list[StepShare]:
        """The same parts with the log-probabilities (of masked tokens) of the weights before the first step.

        A sample that comes again in a later epoch is computed once.
        """
        batches = [part.batch for part in parts]
        first: dict[tuple[int, int], tuple[int, int]] = {}  # sample -> part and position where it comes first
        for i, batch in enumerate(batches):
            for at in range(batch.n_samples):
                first.setdefault(_identity(batch, i, at), (i, at))
        once = [batch.select([at for part, at in first.values() if part == i]) for i, batch in enumerate(batches)]
        routes = [batch.token_keys[ROUTES] for batch in once if batch.n_samples and ROUTES in batch.token_keys]
        joined = Packed(
            torch.cat([batch.tokens for batch in once]),
            tuple(n for batch in once for n in batch.lengths),
            torch.cat([batch.mask for batch in once]),
            token_keys={ROUTES: torch.cat(routes)} if routes else {},
        )
        logprobs = self.inference(joined, Wants("logprobs", temperature, where=joined.mask))
        pieces = dict(zip(first, torch.split(logprobs, list(joined.lengths)), strict=True))
        filled = []
        for i, part in enumerate(parts):
            own = [pieces[_identity(part.batch, i, at)] for at in range(part.batch.n_samples)]
            proximal = torch.cat([logprobs[:0], *own]).to(part.batch.tokens.device)
            keys = {**part.batch.token_keys, PROXIMAL_LOGPROBS: proximal}
            filled.append(replace(part, batch=replace(part.batch, token_keys=keys)))
        return filled

    def accumulate(self, aim: Aim, part: StepShare, masters: Masters) -> PassTotals:
        """Forward and backward passes over this rank's micro-batches; gradients add up in the masters."""
        record = record_of(self.model.network)
        tally, engines = PassTotals(), self.settings.engines
        tally.expert_load = torch.zeros(record.n_numbers if record else 0, dtype=torch.float64)
        tally.gaps = torch.zeros(len(engines), 4, dtype=torch.float64)
        if part.idle:
            tally.add({f"{name}_loss": Mean(0.0, part.idle) for name in aim.call.loss.terms})
        masters.zero()

        def judge(one: PackedMicroBatch, outputs: Outputs) -> Judged:
            if one.dummy:
                return Judged(_of(outputs, one.wants.output).sum() * 0, lambda: None)
            loss, metrics = losses.evaluate(
                aim.call.loss, one.batch, outputs, part.denominator, functions=self.settings.functions
            )

            def note() -> None:
                if aim.seen is not None:
                    aim.seen.update(seen_of(one.batch))
                tally.take(float(loss.detach()), one.batch, outputs)
                tally.add({name: mean for name, mean in metrics.items() if name != "loss"})
                tally.add(observed(one.batch, outputs, aim))
                tally.gaps += gap_sums(one.batch, outputs, aim, engines)

            return Judged(loss * aim.loss_scale, note)

        def note_load(one: PackedMicroBatch, load: Tensor | None) -> None:
            if load is not None and not one.dummy:
                tally.expert_load += load.cpu()

        work = self._step_work(part, self._wants(aim.call))
        if self.staged is not None:
            self.staged.train(work, judge, masters.collect, note_load)
            return tally
        for one in work:
            outputs = self.model.run(one.batch, one.wants)
            note_load(one, outputs.expert_load)
            judged = judge(one, outputs)
            torch.autograd.backward(judged.loss)
            masters.collect()
            judged.note()
        return tally

    @torch.no_grad()
    def evaluate(self, call: Train, part: StepShare) -> dict[str, Metric]:
        """The loss and its own metrics over this rank's micro-batches, by forward passes; of the balance of experts,
        which is of training alone, nothing. None on pipeline stages before the last. Raises NumericsError."""
        terms = {name: term for name, term in call.loss.terms.items() if not term.of_routes}
        loss = msgspec.structs.replace(call.loss, terms=terms)
        wants = self._wants(msgspec.structs.replace(call, loss=loss))
        work = self._step_work(part, wants if losses.needs(loss).entropy else replace(wants, entropy="no"))
        tally, one = PassTotals(), torch.ones((), dtype=torch.float64)
        for microbatch, outputs in zip(work[: len(part.cuts)], self._outputs(work), strict=False):
            value, metrics = losses.evaluate(loss, microbatch.batch, outputs, one, functions=self.settings.functions)
            tally.take(float(value), microbatch.batch, outputs)
            tally.add(metrics)
        if tally.blamed:
            rows = ", ".join(str(row_held_out(group_of(sample))) for sample in tally.blamed)
            raise NumericsError(f"the loss of held-out rows is not finite: {rows} (from 0)", tally.blamed)
        if part.idle:
            tally.add({f"{name}loss": Mean(0.0, part.idle) for name in ("", *(f"{name}_" for name in terms))})
        return tally.metrics

    def _step_work(self, part: StepShare, wants: Wants) -> list[PackedMicroBatch]:
        """The micro-batches of an optimizer step on this rank, and the dummies that make passes equal."""
        later = replace(wants, entropy="no") if wants.entropy == "detached" else wants  # the first is sample enough
        work = []
        for at, samples in enumerate(part.cuts):
            batch = part.batch.select(samples)
            work.append(self._microbatch(batch, replace(later if at else wants, where=batch.mask)))
        return work + [PackedMicroBatch(self._dummy(), later, dummy=True)] * (part.n_passes - len(part.cuts))

    def _wants(self, call: Train) -> Wants:
        """The forward pass that the loss needs. Raises ValueError where the role's head does not give it."""
        needed = losses.needs(call.loss)
        outputs = [name for name in ("values", "scores") if getattr(needed, name)]
        if needed.logprobs or needed.entropy:
            outputs.append("logprobs")
        heads = {"logprobs": "lm", "values": "value", "scores": "score"}
        if len(outputs) > 1 or heads[(outputs or ["logprobs"])[0]] != self.role.head:
            raise ValueError(
                f"the loss needs {' and '.join(outputs)}, but role {call.model!r} has the head {self.role.head!r}"
            )
        entropy = "gradient" if needed.entropy else "detached" if self.settings.entropy_metric else "no"
        return Wants((outputs or ["logprobs"])[0], call.temperature, entropy, balance=needed.balance)

    def reduce(self, masters: Masters, unscale: float) -> Tensor:
        """Sum the gradients over the ranks, multiply by `unscale`, and return their global norm (float64, CPU), in
        which every parameter counts once."""
        masters.sum_over(self.ranks.copies, self.ranks.expert_copies)
        masters.sum_copies()
        if unscale != 1.0:
            masters.flat.mul_(unscale)
        squares, apart = (_square_sum_of(masters.counted(apart=apart)) for apart in (False, True))
        if self.sharded or masters.shards is not None:
            squares = self.ranks.mesh.add(squares + apart)
        else:
            squares = self.ranks.pp.add(self.ranks.tp.add(squares) + self.ranks.ep.add(apart))
        norm: Tensor = squares.sqrt()
        return norm


def _counts_of(ages: Tensor, most: int) -> tuple[int, ...]:
    """The numbers of those that are 0, 1, ... `most`, and of all above."""
    return tuple(torch.bincount(ages.clamp(0, most + 1), minlength=most + 2).tolist())


def _square_sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of several flat tensors, perhaps none: float64, on the CPU."""
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([_square_sum(part) for part in parts]).sum().cpu()


def _square_sum(flat: Tensor) -> Tensor:
    """The sum of squares, float64: of chunks in their own dtype first, as a float64 copy of all would cost more."""
    n = flat.numel() // _NORM_CHUNK_ELEMENTS * _NORM_CHUNK_ELEMENTS
    chunks = torch.linalg.vector_norm(flat[:n].view(-1, _NORM_CHUNK_ELEMENTS), dim=1).double()
    rest: Tensor = torch.linalg.vector_norm(flat[n:], dtype=torch.float64)
    return rest.square_().add_(chunks.square().sum())


def _identity(batch: Packed, part: int, at: int) -> tuple[int, int]:
    """A sample's id where the batch has ids, else its place."""
    return (-1, batch.samples[at]) if batch.samples else (part, at)


def _of(outputs: Outputs, name: str) -> Tensor:
    value = getattr(outputs, name)
    assert isinstance(value, Tensor)
    return value


def _blame(batch: Packed, outputs: Outputs) -> tuple[int, ...]:
    """Ids of the samples whose own outputs are not finite; all of the micro-batch where none stands out."""
    bad = torch.zeros(batch.n_samples, dtype=torch.bool, device=batch.tokens.device)
    for value in (outputs.logprobs, outputs.values):
        if value is not None:
            bad.index_put_((batch.sample_index()[~value.detach().isfinite()],), bad.new_ones(()))
    if outputs.scores is not None:
        bad |= ~outputs.scores.detach().isfinite()
    ids = batch.samples or tuple(range(batch.n_samples))
    blamed = tuple(ids[i] for i in bad.nonzero().squeeze(-1).tolist())
    return blamed or ids
