"""AdamW on master weights, its schedule, and the loss scale of float16. Knows no model call and no batch."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realgraph.graphs.spec import Optimizer
from realgraph.runtime.models.host_states import DroppedStorages
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.stage import stage_of
from realgraph.runtime.parallel.tensor.pieces import cut_of, shard_of
from realgraph.runtime.train.state_shards import StateShards

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class Masters:
    """The tensors an optimizer changes, tied to a model's parameters, with all gradients in one flat buffer.

    A master is the parameter's own local storage where the dtypes agree, else a copy of `dtype` that `publish` casts
    back. Gradients of several backward passes add up in `flat` ([total] of `dtype`). holders: where masters are cut
    over the ranks that hold the same parameters: those, and those that hold the same experts.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, holders: tuple[Ranks, Ranks] | None = None) -> None:
        named = dict(model.named_parameters())
        self.dtype = dtype
        self.names = list(named)
        self.parameters = list(named.values())
        self.cut = cut_of(model)
        self.stage = stage_of(model)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._pieces = [shard_of(parameter) for parameter in self.parameters]
        self.shards: StateShards | None = None
        if holders is not None:
            self.shards = StateShards(self._pieces, [holders[name in self.cut.apart] for name in self.names])
        self._own = self._rows(self._pieces)
        self.separate = any(own.dtype != dtype for own in self._own)
        self.tensors = [own.to(dtype, copy=True) for own in self._own] if self.separate else self._own
        self.flat = torch.zeros(0, dtype=dtype)
        self._grads: list[Tensor] = []
        self._freed = DroppedStorages()
        self._fresh_bytes = 0  # of gradients beside `flat`, at most

    def allocate(self) -> None:
        """Make the gradient buffer; where parameter and master are one, backward adds right into it."""
        if self._grads:
            return
        sizes = [piece.numel() for piece in self._pieces]
        self.flat = torch.zeros(sum(sizes), dtype=self.dtype, device=self.tensors[0].device)
        self._grads = [g.view_as(p) for g, p in zip(torch.split(self.flat, sizes), self._pieces, strict=True)]
        for master, grad in zip(self.tensors, self._rows(self._grads), strict=True):
            master.grad = grad
        if self.separate and not self.sharded:
            for parameter, grad in zip(self.parameters, self._grads, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(_add_to, grad))  # type: ignore[no-untyped-call]
        self.zero()

    def _rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """The part of tensors that lie like the parameters here whose masters this rank has."""
        return tensors if self.shards is None else self.shards.own(tensors)

    def zero(self) -> None:
        """Forget all gradients, and have memory for others."""
        self._freed.restore()
        self.flat.zero_()
        direct = not self.separate and not self.sharded
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad if direct else None

    def free(self) -> None:
        """Give the gradients' memory up, until `zero`."""
        for parameter in self.parameters:
            parameter.grad = None  # nothing may be written to what has no memory
        self._freed.drop([self.flat])

    @torch.no_grad()
    def collect(self) -> None:
        """Add what FSDP's last backward pass left in the parameters, in the masters' dtype, and free it; gradients of
        other parameters have gone into their sums one by one."""
        if not self.sharded:
            return
        n_bytes = 0
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            fresh = parameter.grad
            if fresh is not None:
                own = fresh._local_tensor if isinstance(fresh, DTensor) else fresh
                n_bytes += own.nbytes if own.data_ptr() != grad.data_ptr() else 0
                grad.add_(own)
                parameter.grad = None
        self._fresh_bytes = max(self._fresh_bytes, n_bytes)

    @property
    def gradient_bytes(self) -> int:
        """The memory of gradients in a step, at most."""
        return self.flat.nbytes + self._fresh_bytes

    @torch.no_grad()
    def sum_over(self, copies: Ranks, expert_copies: Ranks) -> None:
        """Sum the gradients over the ranks that hold the same parameters, and the same experts; of masters that are cut
        each rank gets the sum of its rows. FSDP has summed its own. Collective."""
        if self.shards is not None:
            self.shards.sum_own(self._grads)
        elif not self.sharded:
            for ranks, apart in ((copies, False), (expert_copies, True)):
                for run in self._runs(apart=apart):
                    ranks.add(run)

    @torch.no_grad()
    def sum_copies(self) -> None:
        """Sum the gradients of what several tensor-parallel ranks, or two stages, hold; once a step, after all passes.
        Collective."""
        grads = dict(zip(self.names, self._rows(self._grads), strict=True))
        if self.cut.by_name:
            self.cut.sum_copies(grads)
        if self.stage is not None:
            self.stage.sum_tied(grads)

    def counted(self, *, apart: bool) -> list[Tensor]:
        """The gradients, flat, that this rank counts where all ranks that share a copy of the model count each once:
        of experts that are spread, or of all others."""
        cut, stage = self.cut, self.stage
        if not cut.by_name and stage is None and self.shards is None:
            return self._runs(apart=apart)
        return [
            grad.reshape(-1)
            for name, grad in zip(self.names, self._rows(self._grads), strict=True)
            if (name in cut.apart) == apart and cut.owns(name) and (stage is None or stage.owns(name))
        ]

    def _runs(self, *, apart: bool) -> list[Tensor]:
        """The flat gradients of neighbouring parameters, of experts that are spread or of all others."""
        if not self.cut.apart:
            return [] if apart else [self.flat]
        kinds = [name in self.cut.apart for name in self.names]
        sizes = [
            sum(grad.numel() for _, grad in run)
            for _, run in groupby(zip(kinds, self._grads, strict=True), itemgetter(0))
        ]
        return [run for i, run in enumerate(torch.split(self.flat, sizes)) if (i % 2 == 0) == (apart == kinds[0])]

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the parameters."""
        if self.separate:
            for own, master in zip(self._own, self.tensors, strict=True):
                own.copy_(master)

    def gather(self) -> None:
        """Take the parameters' other rows from the ranks that have stepped them. Collective where masters are cut."""
        if self.shards is not None:
            self.shards.gather(self._pieces)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters from the parameters, which were given other weights."""
        if self.separate:
            for own, master in zip(self._own, self.tensors, strict=True):
                master.copy_(own)


@torch.no_grad()
def _add_to(total: Tensor, parameter: Tensor) -> None:
    """Add a gradient that a backward pass has just left to the sum of all, and free it."""
    if parameter.grad is not None:
        total.add_(parameter.grad)
        parameter.grad = None


class Adam:
    """AdamW (arXiv:1711.05101) over masters; weight decay on all of them, as torch's default."""

    def __init__(self, masters: Masters, settings: Optimizer) -> None:
        masters.allocate()
        self.masters = masters
        self._adam = torch.optim.AdamW(
            masters.tensors,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        for master in masters.tensors:
            steps = torch.zeros((), dtype=torch.float32, device=master.device)
            self._adam.state[master] = {"step": steps, **{name: torch.zeros_like(master) for name in MOMENT_NAMES}}

    def step(self, lr: float) -> None:
        """One update from the gradients in the flat buffer. Collective where masters are cut."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.masters.publish()
        self.masters.gather()

    def moments(self) -> list[Tensor]:
        """All moments, this rank's part."""
        return [moment for name in MOMENT_NAMES for moment in self.moments_of(name)]

    def moments_of(self, name: str) -> list[Tensor]:
        """This rank's part of one moment of every parameter, in the masters' order."""
        return [self._adam.state[master][name] for master in self.masters.tensors]

    def set_steps(self, steps: int) -> None:
        """The steps that the moments, which were given other values, come from."""
        for master in self.masters.tensors:
            self._adam.state[master]["step"].fill_(steps)


def lr_factor(step: int, settings: Optimizer, total_steps: int) -> float:
    """Factor of lr at optimizer step `step` (from 0): warm-up to 1, then down to `final_lr_fraction`.

    Warm-up step k of w gives (k + 1) / w, so that the first step is not lost. After it the factor falls over the
    total - w steps that are left and would reach `final_lr_fraction` at step `total_steps`, the first that is not
    taken: the last one taken still has a share of lr, also where the fraction is 0. Steps beyond give the fraction.
    Source: the schedules of transformers (get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup), whose
    factors these are after the warm-up.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps))
    left = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.final_lr_fraction + (1 - settings.final_lr_fraction) * left


@dataclass
class LossScale:
    """The factor that keeps float16 gradients above underflow (arXiv:1710.03740, sec. 3.2); 1 for every other dtype.

    An overflow halves it and the step is done again; `patience` steps without one double it.
    """

    value: float = 1.0
    good_steps: int = 0
    dynamic: bool = False
    patience: int = 2000

    def overflowed(self) -> bool:
        """Halve the scale; False where that can't help."""
        if not self.dynamic or self.value <= 1.0:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def succeeded(self) -> None:
        """Count a good step."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= self.patience:
            self.value, self.good_steps = min(self.value * 2, 2.0**24), 0
