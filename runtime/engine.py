"""The two interfaces behind which engines live, and all that passes through them. Worker side; owns no process and no
socket. `runtime/worker/engines.py` names the engines there are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.runtime.batch import Packed
from realgraph.runtime.wire.protocol import Mean, Metric

Decode = Callable[[Sequence[int]], str]  # token ids to text


class NumericsError(FloatingPointError):
    """A loss or gradient norm is not finite. The weights are those before the step. samples: whose outputs are to
    blame, as far as this rank knows (empty on ranks that held others)."""

    def __init__(self, text: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.samples = samples


class LogprobGap(ArithmeticError):
    """Generator and trainer disagree about the probability of the sampled tokens: no ratio can be trusted."""


def check_gap(gap: Mean, limit: float, when: str, temperature: float, *, agreed: bool) -> None:
    """Raises LogprobGap for a mean difference over `limit`, both in nats. agreed: they did before, in this run."""
    if not gap.value <= limit:
        differs = f"weights, temperature ({temperature:g}) or precision differ"
        reason = "they agreed before, so a weight update of the generator has failed" if agreed else differs
        raise LogprobGap(
            f"{when} the generator's log-probabilities are {gap.value:.3g} nats away from the trainer's on "
            f"average, {limit:.3g} are allowed: {reason}"
        )


@dataclass(frozen=True)
class TrainSettings:
    """Settings of an engine besides its model.

    optimizer: None for a frozen role. total_steps: optimizer steps of the whole run, for the schedule.
    max_logprob_gap: mean |behaviour - recomputed| in nats of the tokens that a train call's own version sampled; None:
    no such gate. max_age: tokens sampled more than this many steps ago have no part in a loss; None: all have one.
    trains: train calls a step of this role; generator_trains: of the role that samples. skip_idle: leave out samples
    whose loss and gradient are exactly zero (`microbatch.idle`); they still count in the losses, in no other metric.
    entropy_metric: measure the entropy in the first micro-batch of each step, where the loss does not need it anyway.
    functions: of `apply` terms.
    """

    max_tokens_per_microbatch: int | None = None
    optimizer: Optimizer | None = None
    total_steps: int = 1
    max_logprob_gap: float | None = None
    max_age: int | None = None
    trains: int = 1
    generator_trains: int = 1
    skip_idle: bool = True
    entropy_metric: bool = True
    functions: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)


class WeightSpec(NamedTuple):
    """A weight as it travels: whole, under its Hugging Face name, in the role's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Weights = Iterator[tuple[str, Tensor]]  # by Hugging Face names, in the order of `weight_specs`


@dataclass(frozen=True)
class OwnWeights:
    """A rollout engine reads its first weights itself, and later ones are sent to it."""

    path: str  # a Hugging Face folder or Hub id
    device: torch.device


@dataclass(frozen=True)
class SharedWeights:
    """A rollout engine reads the tensors of an engine of this process in place: not a byte is copied, and what that
    engine changes is changed for both."""

    folder: Path  # of config.json
    tensors: Mapping[str, Tensor]  # every parameter by its name, whole, detached


WeightSource = OwnWeights | SharedWeights


class Snapshot(Protocol):
    """A whole trained state apart from the engine's own."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        ...

    def write(self, folder: Path) -> None:
        """Write what `TrainEngine.save` would have written. From any thread; not collective. Raises OSError."""
        ...


class Receiver(Protocol):
    """An engine that is sent weights."""

    @property
    def device(self) -> torch.device:
        """The device that its weights lie on."""
        ...

    def weight_specs(self) -> Sequence[WeightSpec]:
        """All of its weights, in the order in which they are sent."""
        ...

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take weights in place, one at a time. Raises ValueError for another set of names or shapes."""
        ...


class TrainEngine(Receiver, Protocol):
    """One role's weights on one data-parallel rank. Runs one call at a time; every rank of the mesh calls it alike."""

    role: ModelRole
    version: int  # completed train calls
    optimizer_steps: int
    gate_passed: bool  # its log-probabilities and the generator's have agreed before

    @property
    def step(self) -> int:
        """The step that the next train call belongs to."""
        ...

    @property
    def source(self) -> Path | None:
        """The folder that its model came from, which may hold a generation config."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens that a sample may have."""
        ...

    def inference(self, batch: Packed, output: Literal["logprobs", "values", "scores"], temperature: float) -> Tensor:
        """[T] for logprobs and values, [N] for scores; micro-batched inside; float32, on the CPU."""
        ...

    def train(self, call: Train, minibatches: Sequence[Packed]) -> dict[str, Metric]:
        """One optimizer step a mini-batch (this rank's shares, all epochs; any may be empty). Adds one to `version`."""
        ...

    def weights(self) -> Weights:
        """Full tensors. Collective where the layout shards."""
        ...

    def average_weights(self, weights: Weights, rate: float, version: int) -> None:
        """Move weights towards others: own + rate x (other - own), in the optimizer's precision."""
        ...

    def shared_weights(self) -> SharedWeights:
        """The live parameters, for a rollout engine beside this one. Raises ValueError where the layout shards them."""
        ...

    def snapshot(self) -> Snapshot | None:
        """A copy of the state in host memory; None where the layout shards it, so that one rank can't have it whole."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights in the Hugging Face form, optimizer and schedule state; collective, rank 0 writes."""
        ...

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, bit for bit."""
        ...


@dataclass(frozen=True)
class Request:
    """One sample to generate. seed: of its own random stream, so that its neighbours do not change it.

    stop_tokens end the sample and belong to it; temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished sample: the new tokens, for each its log-probability under the distribution it was drawn from
    (temperature and truncation applied) and the weight version that drew it."""

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool  # ended by a stop token or string, not by max_new_tokens


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of one engine. Lengths and tokens count prompt and response.

    max_running: default: 128, on a CPU 256. max_length: of a sequence; default: the model's positions.
    max_cache_tokens: slots x length of the cache; default: only bounded by max_running. prefill_tokens: of one forward
    pass, padding included, and of the new prompts that one step takes in. cuda_graphs: replay decode steps on a GPU;
    without effect on a CPU.
    """

    max_running: int | None = None
    max_length: int | None = None
    max_cache_tokens: int | None = None
    prefill_tokens: int = 4096
    cuda_graphs: bool = True


class RolloutEngine(Receiver, Protocol):
    """Takes requests while others run. `step` is one decode step of all that runs: the worker's thread calls it."""

    version: int

    @property
    def source(self) -> Path | None:
        """The folder that its model came from, which may hold a generation config."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that can never run (longer than the model's positions)."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Forget these requests, running or queued."""
        ...

    def step(self) -> list[Completion]:
        """Admit what fits, decode one token for each running sequence, return what finished."""
        ...

    def set_aside(self) -> AbstractContextManager[None]:
        """Inside, the engine has no request, and takes others. Afterwards those it had go on with their tokens, their
        caches recomputed: nothing of them is lost or drawn again."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        ...

    def weights_changed(self, version: int) -> None:
        """Shared weights changed in place. Here and after `load_weights` running requests go on under the new weights,
        their caches recomputed; tokens from here on carry `version`."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights that `TrainEngine.save` wrote, and their version; for weights of its own."""
        ...
