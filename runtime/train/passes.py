"""Forward and backward passes of one role on one rank: cuts, denominators, accumulation, reduction. Takes no decision.

Losses carry global denominators, so gradients only ever add: over micro-batches here, over ranks in one flat all-reduce
(replicated) or in FSDP's reduce-scatter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, VERSIONS
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import ModelRole, Train
from realgraph.runtime.algorithms import losses
from realgraph.runtime.batch import Outputs, Packed
from realgraph.runtime.engine import NumericsError, TrainSettings
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.train.microbatch import cut, idle, rejoin, units
from realgraph.runtime.train.optimizer import Masters
from realgraph.runtime.wire.protocol import Mean, Metric, merge

PROXIMAL_LOGPROBS = "proximal_logprobs"
_NORM_CHUNK_ELEMENTS = 1024


@dataclass(frozen=True)
class StepShare:
    """This rank's share of one optimizer step: its samples with work to do, how they are cut, and the whole step's
    denominator. n_passes: as many as every other rank makes, where they have to be equal.

    sizes: tokens, samples, sampled tokens, and those of them within the age bound, before idle samples were left out.
    n_counted: what has a part in the loss on any rank: sampled tokens, or samples where the loss is of whole scores.
    idle: what idle samples would add to the denominator of this rank.
    """

    batch: Packed
    cuts: list[tuple[int, ...]]
    n_passes: int
    denominator: Tensor
    sizes: tuple[int, int, int, int]
    n_counted: float
    idle: float = 0.0

    @property
    def empty(self) -> bool:
        """Nothing has a part in the loss, on all ranks alike: it is 0 over 0, and no reason to move the weights."""
        return self.n_counted == 0 or float(self.denominator) == 0


@dataclass
class PassTotals:
    """The sums of one optimizer step's passes on this rank. blamed: samples with outputs that are not finite."""

    loss: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)
    blamed: tuple[int, ...] = ()

    @property
    def gap(self) -> Mean:
        """Between generator and trainer, of the tokens seen here."""
        found = self.metrics.get("logprob_gap")
        return found if isinstance(found, Mean) else Mean(0.0, 0.0)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Merge metrics."""
        merge(self.metrics, metrics)

    def take(self, loss: float, batch: Packed, outputs: Outputs) -> None:
        """Add a micro-batch's loss."""
        self.loss += loss
        if not math.isfinite(loss):
            self.blamed += _blame(batch, outputs)


@dataclass(frozen=True)
class Aim:
    """The aim of one optimizer step's passes. gap_version: the weights' version where the gap to the generator
    is to be measured, else None."""

    call: Train
    loss_scale: float = 1.0
    gap_version: int | None = None


class ModelPasses:
    """A role's model on one rank, with its ranks and, where it is trained, its masters."""

    def __init__(self, role: ModelRole, model: PackedModel, ranks: Ranks, settings: TrainSettings) -> None:
        self.role = role
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.sharded = isinstance(model, FSDPModule)

    @torch.no_grad()
    def inference(self, batch: Packed, wants: Wants) -> Tensor:
        """[T] for logprobs and values, [N] for scores, in the batch's order, on the device.

        wants.where: [T] of the whole batch, or None.
        """
        cuts = cut(batch, self.settings.max_tokens_per_microbatch)
        n_passes = int(self.ranks.collect(torch.tensor([len(cuts)])).max()) if self.sharded else len(cuts)
        values = []
        whole = batch if wants.where is None else replace(batch, mask=wants.where)
        for samples in cuts:
            part = whole.select(samples).to(self.ranks.device)
            outputs = self.model.run(part, replace(wants, where=None if wants.where is None else part.mask))
            values.append(_of(outputs, wants.output))
        for _ in range(n_passes - len(cuts)):
            self.model.run(self._dummy(), replace(wants, where=None))
        if not values:
            return torch.zeros(0, device=self.ranks.device)
        return torch.cat(rejoin(cuts, values, None if wants.output == "scores" else batch.lengths))

    def _dummy(self) -> Packed:
        """Two tokens of no weight: a pass that only keeps a sharded model's collectives in step."""
        zeros = torch.zeros(2, dtype=torch.int64, device=self.ranks.device)
        return Packed(zeros, (2,), zeros.bool())

    def parts(self, loss: Loss, minibatches: Sequence[Packed], version: int) -> list[StepShare]:
        """Each mini-batch's work, cut and denominator; one collective for all of them. version: of the weights."""
        if not minibatches:
            raise ValueError("train was called without a mini-batch")
        drafts = [self._draft(loss, batch, version) for batch in minibatches]
        shares = [(float(draft.denominator), draft.n_counted, float(draft.n_passes)) for draft in drafts]
        told = self.ranks.collect(torch.tensor(shares, dtype=torch.float64)).view(-1, len(drafts), 3)
        denominators, counted, passes = (
            told[:, :, 0].sum(0),
            told[:, :, 1].sum(0),
            told[:, :, 2].amax(0).to(torch.int64),
        )
        return [
            replace(
                draft,
                denominator=denominators[i].to(self.ranks.device),
                n_counted=float(counted[i]),
                n_passes=int(passes[i]) if self.sharded else draft.n_passes,
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
        cuts = cut(work, self.settings.max_tokens_per_microbatch, loss.needs_whole_groups)
        n_sampled, n_fresh = int(batch.mask.sum()), int(fresh.mask.sum())
        sizes = (batch.n_tokens, fresh.n_samples, n_sampled, n_fresh)
        left_out = float(share - losses.denominator(loss, work)) if work is not fresh else 0.0
        n_counted = fresh.n_samples if losses.needs(loss).scores else n_fresh
        return StepShare(work, cuts, len(cuts), share, sizes, float(n_counted), left_out)

    def _fresh(self, loss: Loss, batch: Packed, version: int) -> Packed:
        """The batch without what is over the age bound: its tokens masked, or in a loss that compares whole samples of
        a group, the groups that have such tokens left out."""
        settings = self.settings
        if settings.max_age is None or VERSIONS not in batch.token_keys:
            return batch
        sampled_in = torch.div(batch.token_keys[VERSIONS], settings.generator_trains, rounding_mode="floor")
        overdue = batch.mask & (version // settings.trains - sampled_in > settings.max_age)
        if not loss.needs_whole_groups:
            return replace(batch, mask=batch.mask & ~overdue)
        late = set(batch.sample_index()[overdue].tolist())
        return batch.select([i for unit in units(batch, True) if late.isdisjoint(unit) for i in unit])

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
        joined = Packed(
            torch.cat([batch.tokens for batch in once]),
            tuple(n for batch in once for n in batch.lengths),
            torch.cat([batch.mask for batch in once]),
        )
        logprobs = self.inference(joined, Wants("logprobs", temperature, where=joined.mask))
        pieces = dict(zip(first, torch.split(logprobs, list(joined.lengths)), strict=True))
        found = []
        for i, part in enumerate(parts):
            own = [pieces[_identity(part.batch, i, at)] for at in range(part.batch.n_samples)]
            proximal = torch.cat([logprobs[:0], *own]).to(part.batch.tokens.device)
            keys = {**part.batch.token_keys, PROXIMAL_LOGPROBS: proximal}
            found.append(replace(part, batch=replace(part.batch, token_keys=keys)))
        return found

    def accumulate(self, aim: Aim, part: StepShare, masters: Masters) -> PassTotals:
        """Forward and backward passes over this rank's micro-batches; gradients add up in the masters."""
        tally = PassTotals()
        if part.idle:
            tally.add({f"{name}_loss": Mean(0.0, part.idle) for name in aim.call.loss.terms})
        wants = self._wants(aim.call)
        masters.zero()
        if self.role.gradient_checkpointing:
            self.model.train()  # transformers recomputes layers in training mode only; it changes nothing else here
        for at, samples in enumerate(part.cuts):
            if at == 1 and wants.entropy == "detached":
                wants = replace(wants, entropy="no")  # the first micro-batch is sample enough for a metric
            batch = part.batch.select(samples).to(self.ranks.device)
            outputs = self.model.run(batch, replace(wants, where=batch.mask))
            loss, metrics = losses.evaluate(
                aim.call.loss, batch, outputs, part.denominator, functions=self.settings.functions
            )
            torch.autograd.backward(loss * aim.loss_scale)
            masters.collect()
            tally.take(float(loss.detach()), batch, outputs)
            tally.add({name: mean for name, mean in metrics.items() if name != "loss"})
            tally.add(_observed(batch, outputs, aim.gap_version))
        for _ in range(part.n_passes - len(part.cuts)):
            torch.autograd.backward(_of(self.model.run(self._dummy(), wants), wants.output).sum() * 0)
            masters.collect()
        self.model.eval()
        return tally

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
        return Wants((outputs or ["logprobs"])[0], call.temperature, entropy)

    def reduce(self, masters: Masters, unscale: float) -> Tensor:
        """Sum the gradients over the ranks, multiply by `unscale`, and return their global norm (float64, CPU)."""
        flat = masters.flat
        if not self.sharded:
            self.ranks.add(flat)
        if unscale != 1.0:
            flat.mul_(unscale)
        squares = _square_sum(flat).cpu()
        if self.sharded:
            self.ranks.add(squares)
        norm: Tensor = squares.sqrt()
        return norm


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


def _observed(batch: Packed, outputs: Outputs, gap_version: int | None) -> dict[str, Mean]:
    """Metrics of the engine's own: entropy, and the gap to the generator on tokens that `gap_version` sampled."""
    found: dict[str, Tensor] = {}
    if outputs.entropy is not None and not outputs.entropy.requires_grad:
        found["entropy"] = outputs.entropy[batch.mask]
    if gap_version is not None and outputs.logprobs is not None and BEHAVIOUR_LOGPROBS in batch.token_keys:
        present = batch.mask
        if VERSIONS in batch.token_keys:
            present = present & (batch.token_keys[VERSIONS] == gap_version)
        found["logprob_gap"] = (outputs.logprobs.detach() - batch.token_keys[BEHAVIOUR_LOGPROBS])[present].abs()
    if not found:
        return {}
    totals = torch.stack([value.sum(dtype=torch.float64) for value in found.values()]).tolist()
    return {name: Mean(total, value.numel()) for (name, value), total in zip(found.items(), totals, strict=True)}


def _blame(batch: Packed, outputs: Outputs) -> tuple[int, ...]:
    """Ids of the samples whose own outputs are not finite; all of the micro-batch where none stands out."""
    bad = torch.zeros(batch.n_samples, dtype=torch.bool, device=batch.tokens.device)
    for value in (outputs.logprobs, outputs.values):
        if value is not None:
            bad.index_put_((batch.sample_index()[~value.detach().isfinite()],), bad.new_ones(()))
    if outputs.scores is not None:
        bad |= ~outputs.scores.detach().isfinite()
    ids = batch.samples or tuple(range(batch.n_samples))
    found = tuple(ids[i] for i in bad.nonzero().squeeze(-1).tolist())
    return found or ids


def numerics_error(loss: float, norm: float, samples: tuple[int, ...]) -> NumericsError:
    what = f"the loss is {loss}" if loss - loss != 0 else f"the gradient norm is {norm}"
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    where = f"; samples {shown}" if samples else ""
    return NumericsError(f"{what} before the optimizer step, which was not taken{where}", samples)
