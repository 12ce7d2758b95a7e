"""The torch engine behind `TrainEngine`: one role on one worker. Owns its model, optimizer and version.

Every decision that ends a step (a loss that is not finite, a log-probability gap) is taken on numbers that all workers
of the mesh share, so that they stop together; the passes themselves are `train_passes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import ModelRole, Train
from realgraph.planner.costs.memory.terms import distributes_states
from realgraph.planner.plan.layout import Layout
from realgraph.planner.request.engine_support import TORCH, Axis, axes_text
from realgraph.runtime.algorithms import losses
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import RELEASED, Parts, SharedWeights, TrainOptions, TrainSettings, Weights, WeightSpec
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.logprob_gap import check_engines, check_gap, gaps_of
from realgraph.runtime.models.building import DTYPES, Start, build, master_dtype
from realgraph.runtime.models.fixed import fixed_parts
from realgraph.runtime.models.host_states import DroppedStorages
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.models.train_state import Counters
from realgraph.runtime.models.weights import full_tensors, take_weights, weight_specs, whole_shapes
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.experts.block import join_experts, shard_experts
from realgraph.runtime.parallel.experts.routing import load_metrics, record_of
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from realgraph.runtime.parallel.pipeline.stage import cut_stages, layer_stages
from realgraph.runtime.parallel.segments import WeightSegment, share_weights
from realgraph.runtime.parallel.sharding import shard
from realgraph.runtime.parallel.tensor.network import cut_network
from realgraph.runtime.parallel.tensor.pieces import cut_of, shard_of
from realgraph.runtime.train import files as train_files
from realgraph.runtime.train.audit import Seen, fates
from realgraph.runtime.train.errors import numerics_error
from realgraph.runtime.train.files import HostSnapshot
from realgraph.runtime.train.observed import Aim
from realgraph.runtime.train.optimizer import Adam, LossScale, Masters, lr_factor
from realgraph.runtime.train.passes import ModelPasses, PassTotals, StepShare
from realgraph.runtime.train.recompute import recomputing
from realgraph.runtime.wire.metrics import Mean, Metric, ResidentBytes

FIRST_LOSS_SCALE = 2.0**16  # of float16 losses


class TorchTrainEngine:
    """Implements `engine.TrainEngine`. Frozen roles (no optimizer) infer, and take weights or averages of them.

    Metrics of `train`: each data-parallel rank's head worker returns the rank's share, and shares merge
    (`protocol.merge`) to the truth; what all workers know alike (loss, grad_norm, lr, optimizer_steps) comes from one
    alone.
    """

    def __init__(
        self, role: ModelRole, model: PackedModel, layout: Layout, ranks: LayoutRanks, settings: TrainSettings
    ) -> None:
        self.version = 0
        self.role, self.model = role, model
        self.settings, self.ranks = settings, ranks
        self.optimizer_steps = self.due_steps = 0  # that were taken; that the schedule has passed
        self.gate_passed = False
        self.segment: WeightSegment | None = None  # that the weights lie in
        self.passes = ModelPasses(role, model, ranks, settings)
        # no worker has all of it
        self.divided = self.passes.sharded or bool(cut_of(model.network).by_name) or self.passes.pipe is not None
        self.dtype = DTYPES[role.dtype]
        self.masters: Masters | None = None
        self.adam: Adam | None = None
        self.scale = LossScale()
        if settings.optimizer is None:
            model.requires_grad_(False)
        if settings.optimizer is not None or role.ema_rate is not None:
            self.masters = Masters(model.network, master_dtype(role), self._state_holders(layout))
        if settings.optimizer is not None and self.masters is not None:
            self.adam = Adam(self.masters, settings.optimizer)
            self.masters.free()
            if self.dtype == torch.float16:
                self.scale = LossScale(FIRST_LOSS_SCALE, dynamic=True)
        self._dropped = DroppedStorages()  # of a copy that was given up
        place = layout, layout.mesh.first + ranks.mesh.rank, ranks.apart
        self.contents = train_files.contents_of(model, place, self.dtype, self.masters, self.adam)

    def _state_holders(self, layout: Layout) -> tuple[Ranks, Ranks] | None:
        """The ranks over which optimizer states are cut: those with the same parameters, and those with the same
        experts. None where each has all states of its parameters, or FSDP cuts these."""
        holders = self.ranks.copies, self.ranks.expert_copies
        cut = self.settings.optimizer is not None and distributes_states(layout)
        return holders if cut and max(ranks.size for ranks in holders) > 1 else None

    def inference(self, batch: Packed, output: Literal["logprobs", "values", "scores"], temperature: float) -> Tensor:
        """[T] for logprobs and values, [N] for scores; float32, on the CPU, in the batch's order."""
        return self.passes.inference(batch, Wants(output, temperature)).to("cpu", torch.float32)

    def evaluate(self, call: Train, batch: Packed) -> dict[str, Metric]:
        """See TrainEngine. Raises NumericsError for a loss that is not finite."""
        found = self.passes.evaluate(call, self.passes.parts(call.loss, [batch], self.version)[0])
        self._reshard()
        return found if self.ranks.heads else {}

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, call: Train, minibatches: Sequence[Packed], how: TrainOptions | None = None) -> dict[str, Metric]:
        """One optimizer step a mini-batch; those of all epochs come at once. Raises NumericsError or LogprobGap before
        the step that is to blame.

        Besides the loss's own metrics: loss, grad_norm, lr, optimizer_steps, n_tokens (of the batch), skipped (share of
        samples left out as idle), overdue (share of sampled tokens over the age bound), age_0, age_1, ..., age_older
        (shares by age in steps), logprob_gap (at the first mini-batch, before its step), empty_steps (optimizer
        steps that were not taken, as nothing had a part in their loss; only where there are any), entropy (over the
        first micro-batch of each step, on each rank), of experts load_imbalance, expert_load_0, ... and router_entropy
        (over all tokens of a step, a common beginning that is computed once counted once; see `load_metrics`) and, in
        float16, loss_scale.
        """
        how = how or TrainOptions()
        recompute = how.recompute or ("full" if self.role.gradient_checkpointing else "none")
        audit, settle = how.audit, how.before_step or _nothing
        parts = self.passes.parts(call.loss, minibatches, self.version)
        if losses.needs(call.loss).proximal and len(parts) > 1:
            parts = self.passes.with_proximal(parts, call.temperature)
        tally = PassTotals()
        try:
            with recomputing(self.model.network, recompute):
                for step, part in enumerate(parts):
                    seen: Seen | None = None if audit is None else {}
                    tally.add(self._step(call, part, seen, settle, first=step == 0))
                    self.due_steps += 1
                    if audit is not None and seen is not None:
                        audit += fates(minibatches[step], step, seen)
            settle()
        finally:
            if self.masters is not None:
                self.masters.free()
        self.version += 1
        return {**tally.metrics, **self._counts(parts, call.epochs)} if self.ranks.heads else {}

    def _step(
        self, call: Train, part: StepShare, seen: Seen | None, settle: Callable[[], None], *, first: bool
    ) -> dict[str, Metric]:
        """One optimizer step, after `settle`. In float16 an overflow halves the loss scale and does the passes
        again."""
        adam = self.adam
        if adam is None or self.settings.optimizer is None:
            raise ValueError("this engine's role is frozen: it was opened without an optimizer")
        if part.empty:
            return {"loss": Mean(0.0, 0.0), "grad_norm": Mean(0.0, 0.0)}  # no part in the means of steps taken
        while True:
            gate = self.version if first else None
            aim = Aim(call, self.scale.value, gate, self.settings.mixed_caches, seen)
            tally = self.passes.accumulate(aim, part, adam.masters)
            gap = tally.gap
            local = torch.tensor(
                [tally.loss, gap.total, gap.weight, *tally.gaps.view(-1).tolist()], dtype=torch.float64
            )
            own = local if self.ranks.heads else torch.zeros_like(local)  # what all of a data-parallel rank know alike
            sums = self.ranks.mesh.add(torch.cat([own, tally.expert_load]))
            loss, n_sums = sums[0], len(local)
            self._gate(call, Mean(*sums[1:3].tolist()), sums[3:n_sums].view(-1, 4).tolist())
            norm = self.passes.reduce(adam.masters, 1.0 / self.scale.value)
            if bool(loss.isfinite()) and bool(norm.isfinite()):
                break
            if not (bool(loss.isfinite()) and self.scale.overflowed()):
                adam.masters.zero()
                raise numerics_error(float(loss), float(norm), _of_all(self.ranks.mesh, tally.blamed))
        settle()
        self._reshard()  # where `settle` has made a forward pass
        limit = self.settings.optimizer.max_grad_norm
        if limit is not None and (clip := limit / (float(norm) + 1e-6)) < 1.0:
            adam.masters.flat.mul_(clip)
        lr = call.lr * lr_factor(self.due_steps, self.settings.optimizer, self.settings.total_steps)
        adam.step(lr)
        self.optimizer_steps += 1
        self.scale.succeeded()
        if self.ranks.leads:
            known = {"loss": float(loss), "grad_norm": float(norm), "lr": lr}
            known |= load_metrics(sums[n_sums:], record_of(self.model.network))
            tally.add({name: Mean(value) for name, value in known.items()})
        return tally.metrics

    def _gate(self, call: Train, gap: Mean, by_engine: Sequence[Sequence[float]]) -> None:
        """Refuse to train on tokens of the newest weights whose probabilities an engine, or all together, got wrong.
        by_engine: rows of `gap_sums`. All ranks alike.

        Looked at in every call, which costs nothing: the pass gives the log-probabilities anyway.
        """
        limit = self.settings.max_logprob_gap
        if limit is not None and gap.weight:
            gaps, when = gaps_of(by_engine, self.settings.engines, self.version), f"in step {self.step}"
            check_engines(gaps, limit, when, call.temperature, agreed=self.gate_passed)
            check_gap(gap, limit, when, call.temperature, agreed=self.gate_passed)
            self.gate_passed = True

    @property
    def step(self) -> int:
        """The step that the next train call belongs to."""
        return self.version // self.settings.trains

    def _counts(self, parts: Sequence[StepShare], epochs: int) -> dict[str, Metric]:
        """This rank's share of what is known without a pass."""
        lead = 1.0 if self.ranks.leads else 0.0
        n_tokens, n_samples, n_sampled, n_fresh = (
            sum(column) for column in zip(*(p.sizes for p in parts), strict=True)
        )
        n_empty = sum(part.empty for part in parts)
        counts: dict[str, Metric] = {
            "n_tokens": Mean(n_tokens / epochs, lead),
            "optimizer_steps": Mean(lead * (len(parts) - n_empty), lead),
            "skipped": Mean(float(n_samples - sum(part.batch.n_samples for part in parts)), float(n_samples)),
        }
        if self.settings.max_age is not None:
            counts["overdue"] = Mean(float(n_sampled - n_fresh), float(n_sampled))
        by_age = [sum(found) for found in zip(*(part.ages for part in parts), strict=True)]
        for age, found in zip([*range(len(by_age) - 1), "older"], by_age, strict=True) if by_age else ():
            counts[f"age_{age}"] = Mean(float(found), float(n_sampled))
        if n_empty:
            counts["empty_steps"] = Mean(lead * n_empty, lead)
        if self.scale.dynamic:
            counts["loss_scale"] = Mean(lead * self.scale.value, lead)
        return counts

    @property
    def device(self) -> torch.device:
        """The device that its weights lie on."""
        return self.ranks.device

    @property
    def source(self) -> Path | None:
        """The folder that its model came from."""
        return self.model.source

    @property
    def max_positions(self) -> int:
        """Tokens that a sample may have."""
        return int(self.model.config.max_position_embeddings)

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Full tensors of the role's dtype by their Hugging Face names, in a fixed order. Collective where divided."""
        return full_tensors(self.model.network, self.dtype)

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """Names, shapes and dtype of `weights`."""
        return weight_specs(self.model.network, self.dtype)

    def shared_weights(self) -> SharedWeights:
        """See TrainEngine. Everything here changes parameters in place, so that who shares them sees each change."""
        if self.passes.sharded or self.model.source is None:
            raise ValueError("sharded weights, or such of no folder, can't be read in place")
        named = self.model.network.named_parameters()
        fixed = {name: part.values for name, part in fixed_parts(self.model.network).items()}
        return SharedWeights(self.model.source, {name: parameter.detach() for name, parameter in named} | fixed)

    @contextmanager
    def local_parts(self) -> Iterator[Mapping[str, WeightPart]]:
        """See TrainEngine."""
        yield self.contents.weights

    def load_weights(self, parts: Parts, version: int) -> None:
        """Take weights in place; moments stay. Raises ValueError for parts that are missing or have no place."""
        self._reshard()
        self._dropped.restore()
        take_weights(self.model.network, parts, self.contents.weights)
        if self.masters is not None:
            self.masters.refresh()
        self.version = version

    def release(self) -> None:
        """See TrainEngine."""
        assert self.masters is None, "only copies are given up"
        self._dropped.drop(self.state_tensors())
        self.version = RELEASED

    def prefetched(self) -> AbstractContextManager[int]:
        """See TrainEngine. Its states are there."""
        return nullcontext(0)

    def average_weights(self, parts: Parts, rate: float, version: int) -> None:
        """Move weights towards others: own + rate x (other - own), in the masters' precision (a reference's EMA)."""
        if self.masters is None:
            raise ValueError("this role was opened without `ema_rate`")
        masters = dict(zip(self.masters.names, self.masters.tensors, strict=True))
        averages = {name: part._replace(values=masters[name]) for name, part in self.contents.weights.items()}
        self._reshard()
        take_weights(self.model.network, parts, averages, lambda own, new: own.lerp_(new.to(own), rate))
        self.masters.publish()
        self.version = version

    def state_tensors(self) -> list[Tensor]:
        """This rank's part of the weights, masters and moments: all tensors that outlive a call."""
        self._reshard()
        own = [shard_of(parameter) for parameter in self.model.network.parameters()]
        if self.masters is not None:
            own += self.masters.tensors
        if self.adam is not None:
            own += self.adam.moments()
        return own

    def resident_bytes(self) -> ResidentBytes:
        """See TrainEngine."""
        weights = sum(part.values.nbytes for part in self.contents.weights.values())
        if self.masters is None:
            return ResidentBytes(weights)
        states = [*self.masters.tensors] if self.masters.separate else []
        states += self.adam.moments() if self.adam is not None else []
        return ResidentBytes(weights, self.masters.gradient_bytes, sum(tensor.nbytes for tensor in states))

    def _reshard(self) -> None:
        """Free what a forward pass has left gathered: FSDP2 keeps the outermost parameters for a backward pass."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    def save(self, folder: RunPath) -> None:
        """Write this worker's share of `folder`, as `train_files` says. Raises OSError."""
        train_files.save(self.contents, self._counters(), folder)

    def snapshot(self) -> HostSnapshot:
        """See TrainEngine."""
        return train_files.snapshot(self.contents, self._counters())

    def load(self, folder: RunPath) -> None:
        """Take back what `save` wrote, bit for bit, under any layout."""
        self._reshard()
        counters = train_files.load(self.contents, folder)
        self.version = counters.version
        self.optimizer_steps, self.due_steps = counters.optimizer_steps, counters.schedule_steps
        self.scale.value, self.scale.good_steps = counters.loss_scale, counters.good_steps
        self.gate_passed = self.gate_passed or counters.gate_passed

    def _counters(self) -> Counters:
        known = self.version, self.optimizer_steps, self.due_steps, self.scale.value, self.scale.good_steps
        return Counters(*known, self.gate_passed)


def open_engine(
    role: ModelRole, path: str, layout: Layout, ranks: LayoutRanks, settings: TrainSettings
) -> TorchTrainEngine:
    """Build a role's model from `path`, cut and shard it by `layout`, and put an engine round it. Collective.

    Raises ConfigError for what this engine can't do (`check_support`) and for files it can't take (`models.build`).
    """
    check_support(role, layout)
    master = master_dtype(role)
    fsdp = layout.sharding == "fsdp" and ranks.copies.size > 1
    has_masters = settings.optimizer is not None or role.ema_rate is not None

    def cut_up(model: PackedModel) -> None:
        shapes = whole_shapes(model.network)
        if ranks.tp.size > 1 or ranks.ep.size > 1:
            cut_network(model.network, model.head, ranks.tp, ranks.ep)
            join_experts(model.network, ranks.ep)
        if ranks.pp.size > 1:
            cut_stages(model.network, layer_stages(model.config, model.head, layout), ranks.pp, shapes)
        if fsdp:
            compute = DTYPES[role.dtype]
            dtypes = (compute, master if has_masters else compute)
            left_out = shard_experts(model.network, ranks.expert_copies, dtypes)
            shard(model, model.network.model.layers, ranks.copies, dtypes, left_out)

    dtype = master if fsdp and has_masters else None
    model = build(role, path, Start(ranks.device, dtype, shard=cut_up))
    model.context = ranks.cp if ranks.cp.size > 1 else None
    segment = share_weights(model) if settings.shared and ranks.device.type == "cpu" else None
    engine = TorchTrainEngine(role, model, layout, ranks, settings)
    engine.segment = segment
    return engine


def check_support(role: ModelRole, layout: Layout) -> None:
    """Raises ConfigError for axes of parallelism and for dtypes that this engine does not have."""
    if role.dtype not in TORCH.dtypes:
        text = f"the train engine does not compute in {role.dtype}"
        raise ConfigError([Problem(Where(path="$.models"), text, f"set dtype to {' or '.join(TORCH.dtypes)}", "dtype")])
    axes: tuple[Axis, ...] = ("tp", "pp", "ep", "cp")
    for axis in axes:
        if getattr(layout, axis) != 1 and axis not in TORCH.axes:
            asked = f"the layout asks for {axis} = {getattr(layout, axis)}"
            text = f"the train engine has {axes_text(TORCH.axes)} only; {asked}"
            raise ConfigError([Problem(Where(path=f"$.layout.{axis}"), text, f"set {axis} to 1", "layout")])


def _nothing() -> None:
    """Nobody else needs the weights as they are."""


def _of_all(ranks: Ranks, own: Sequence[int]) -> tuple[int, ...]:
    """The numbers that any of the ranks has, ascending, none below 0. Collective."""
    n = int(ranks.collect(torch.tensor([len(own)])).max())
    if n == 0:
        return ()
    padded = torch.tensor([*own, *[-1] * (n - len(own))])
    return tuple(sorted({*ranks.collect(padded).view(-1).tolist()} - {-1}))
