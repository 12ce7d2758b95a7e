"""AdamW on master weights, its schedule, and the loss scale of float16. Knows no model call and no batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realgraph.graphs.spec import Optimizer
from realgraph.runtime.models.weights import own_part

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
        self.sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._own = [own_part(parameter)[0] for parameter in self.parameters]
        self.separate = any(own.dtype != dtype for own in self._own)
        self.tensors = [own.to(dtype, copy=True) for own in self._own] if self.separate else self._own
        self.flat = torch.zeros(0, dtype=dtype)
        self._grads: list[Tensor] = []

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
        """Forget all gradients."""
        self.flat.zero_()
        direct = not self.separate and not self.sharded
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad if direct else None

    @torch.no_grad()
    def collect(self) -> None:
        """Add what the last backward pass left in the parameters, in the masters' dtype, and free it."""
        if not self.separate and not self.sharded:
            return
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            found = parameter.grad
            if found is not None:
                grad.add_(found._local_tensor if isinstance(found, DTensor) else found)
                parameter.grad = None

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
        """The full tensor of what this rank holds `local` of, laid out as parameter `index`. Collective if sharded."""
        parameter = self.parameters[index]
        if not isinstance(parameter, DTensor):
            return local
        spread = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return spread.full_tensor()

    def part(self, index: int) -> tuple[slice, ...]:
        """Which part of the full tensor of parameter `index` this rank holds."""
        return own_part(self.parameters[index])[1]


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

    def step(self, lr: float) -> None:
        """One update from the gradients in the flat buffer."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.masters.publish()

    def moment(self, index: int, name: str) -> Tensor:
        """A moment of parameter `index`, this rank's part; zeros before the first step."""
        master = self.masters.tensors[index]
        state = self._adam.state[master]
        return state[name] if state else torch.zeros_like(master)

    def restore(self, index: int, moments: dict[str, Tensor], steps: int) -> None:
        """Set the moments (this rank's part) and the step count of parameter `index`."""
        master = self.masters.tensors[index]
        state = self._adam.state[master]
        state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=master.device)
        for name in MOMENT_NAMES:
            state[name] = moments[name].to(master, copy=True)


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
