"""AdamW on master weights, its schedule, and the loss scale of float16. Knows no model call and no batch."""

import math
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realgraph.graphs.spec import Optimizer
from realgraph.runtime.models.host_states import DroppedStorages
from realgraph.runtime.parallel.pipeline.stage import stage_of
from realgraph.runtime.parallel.tensor.pieces import cut_of, shard_of

MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class Masters:
    """The tensors an optimizer changes, tied to a model's parameters, with all gradients in one flat buffer.

    A master is the parameter's own local storage where the dtypes agree, else a copy of `dtype` that `publish` casts
    back. Gradients of several backward passes add up in `flat` ([total] of `dtype`).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        named = dict(model.named_parameters())
        self.dtype = dtype
        self.names = list(named)
        self.parameters = list(named.values())
        self.cut = cut_of(model)
        self.stage = stage_of(model)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._own = [shard_of(parameter) for parameter in self.parameters]
        self.separate = any(own.dtype != dtype for own in self._own)
        self.tensors = [own.to(dtype, copy=True) for own in self._own] if self.separate else self._own
        self.flat = torch.zeros(0, dtype=dtype)
        self._grads: list[Tensor] = []
        self._freed = DroppedStorages()

    def allocate(self) -> None:
        """Make the gradient buffer; where parameter and master are one, backward adds right into it."""
        if self._grads:
            return
        sizes = [master.numel() for master in self.tensors]
        self.flat = torch.zeros(sum(sizes), dtype=self.dtype, device=self.tensors[0].device)
        self._grads = [g.view_as(m) for g, m in zip(torch.split(self.flat, sizes), self.tensors, strict=True)]
        for master, grad in zip(self.tensors, self._grads, strict=True):
            master.grad = grad
        self.zero()

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
        """Add what the last backward pass left in the parameters, in the masters' dtype, and free it."""
        if not self.separate and not self.sharded:
            return
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            fresh = parameter.grad
            if fresh is not None:
                grad.add_(fresh._local_tensor if isinstance(fresh, DTensor) else fresh)
                parameter.grad = None

    @torch.no_grad()
    def sum_copies(self) -> None:
        """Sum the gradients of what several tensor-parallel ranks, or two stages, hold; once a step, after all passes.
        Collective."""
        grads = dict(zip(self.names, self._grads, strict=True))
        if self.cut.by_name:
            self.cut.sum_copies(grads)
        if self.stage is not None:
            self.stage.sum_tied(grads)

    def counted(self) -> list[Tensor]:
        """The gradients, flat, that this rank counts where all ranks that share a copy of the model count each once;
        none of experts that are spread."""
        cut, stage = self.cut, self.stage
        if not cut.by_name and stage is None:
            return [self.flat]
        return [
            grad.view(-1)
            for name, grad in zip(self.names, self._grads, strict=True)
            if name not in cut.apart and cut.owns(name) and (stage is None or stage.owns(name))
        ]

    def runs(self, *, apart: bool) -> list[Tensor]:
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

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters from the parameters, which were given other weights."""
        if self.separate:
            for own, master in zip(self._own, self.tensors, strict=True):
                master.copy_(own)

    def whole(self, index: int, local: Tensor) -> Tensor:
        """The full tensor of what this rank holds `local` of, laid out as parameter `index`. Collective if sharded or
        cut."""
        parameter, name = self.parameters[index], self.names[index]
        if not isinstance(parameter, DTensor):
            return self.cut.whole(name, local)
        spread = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return self.cut.whole(name, spread.full_tensor())


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
        """One update from the gradients in the flat buffer."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.masters.publish()

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
