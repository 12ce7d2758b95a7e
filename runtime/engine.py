"""The two interfaces behind which engines live, and all that passes through them; `worker/engines.py` names engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import Recompute
from realgraph.runtime.batch import Packed
from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.job.audit import Audit
from realgraph.runtime.parallel.exchange import WeightPart
from realgraph.runtime.parallel.segments import WeightSegment
from realgraph.runtime.wire.metrics import Metric, ResidentBytes

RELEASED = -1  # the version of weights that were given up
Decode = Callable[[Sequence[int]], str]  # token ids to text


@dataclass(frozen=True)
class TrainSettings:
    """Settings of an engine besides its model.

    optimizer: None for a frozen role. total_steps: optimizer steps of the whole run, for the schedule. max_logprob_gap:
    mean |behaviour - recomputed| in nats of the tokens that a train call's own version sampled; None: no such gate.
    engines: workers of those that sample, each of which the gate judges by itself. max_age: tokens sampled more than
    this many steps ago have no part in a loss; None: all have one. counted_ages: tokens are counted by age in steps
    up to this one, older ones together; None: they have none. trains: train calls a step of this role;
    generator_trains: of the role that samples. skip_idle: leave out samples whose loss and gradient are exactly zero
    (`microbatch.idle`); they still count in losses, in no other metric. entropy_metric: in the first micro-batch of a
    step. mixed_caches: tokens may be drawn over keys of older weights; the gate looks at no sample of two versions.
    functions: of `apply` terms. offloaded: states wait in host memory. shared: workers of a host may read the weights.
    """

    max_tokens_per_microbatch: int | None = None
    optimizer: Optimizer | None = None
    total_steps: int = 1
    max_logprob_gap: float | None = None
    engines: tuple[int, ...] = ()
    max_age: int | None = None
    counted_ages: int | None = None
    trains: int = 1
    generator_trains: int = 1
    skip_idle: bool = True
    entropy_metric: bool = True
    mixed_caches: bool = False
    functions: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    offloaded: bool = False
    shared: bool = False


@dataclass(frozen=True)
class TrainOptions:
    """Settings of one train call. before_step: called on all ranks before weights change and at the end; may infer."""

    recompute: Recompute | None = None  # in backward passes; None: as the role says
    audit: Audit | None = None  # takes what each loss uses of each sample
    before_step: Callable[[], None] | None = None


class WeightSpec(NamedTuple):
    """A weight as it travels: whole, under its Hugging Face name, in the role's dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Weights = Iterator[tuple[str, Tensor]]  # whole, by Hugging Face names, in the order of `weight_specs`
Parts = Iterator[WeightPart]  # in any order


@dataclass(frozen=True)
class OwnWeights:
    """A rollout engine reads its first weights itself, and later ones are sent to it."""

    path: str  # a Hugging Face folder or Hub id
    device: torch.device
    offloaded: bool = False  # they wait in host memory from each `release` to the next request
    beside: bool = False  # later ones come while it generates, to memory of their own


@dataclass(frozen=True)
class SharedWeights:
    """A rollout engine reads the tensors of an engine of this process in place: what that changes changes for both."""

    folder: Path  # of config.json
    tensors: Mapping[str, Tensor]  # this rank's parameters by their names, detached, and those that no step changes


WeightSource = OwnWeights | SharedWeights


class Snapshot(Protocol):
    """One worker's part of a trained state, apart from the engine's own."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        ...

    def write(self, folder: RunPath, writers: Sequence[int]) -> None:
        """Write this worker's share of what `TrainEngine.save` would have written, where of the workers only `writers`
        are left. From any thread. Raises OSError; LostPart where they do not have all of it."""
        ...


class TrainEngine(Protocol):
    """One role's weights on one data-parallel rank. Runs one call at a time; every rank of the mesh calls it alike."""

    @property
    def gate_passed(self) -> bool:
        """Its log-probabilities and the generator's have agreed before."""
        ...

    @gate_passed.setter
    def gate_passed(self, passed: bool) -> None: ...

    @property
    def role(self) -> ModelRole:
        """The role whose weights they are."""
        ...

    @property
    def version(self) -> int:
        """Completed train calls."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that were taken."""
        ...

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

    @property
    def device(self) -> torch.device:
        """The device that its weights lie on."""
        ...

    def weight_specs(self) -> Sequence[WeightSpec]:
        """All of its weights, in the order in which they are sent."""
        ...

    def load_weights(self, parts: Parts, version: int) -> None:
        """Take weights in place, part by part: all that lies here, each once. Raises ValueError for anything else."""
        ...

    def release(self) -> None:
        """Give up the memory of frozen weights: until `load_weights` there are none, and the version is RELEASED."""
        ...

    def inference(self, batch: Packed, output: Literal["logprobs", "values", "scores"], temperature: float) -> Tensor:
        """[T] for logprobs and values, [N] for scores; micro-batched inside; float32, on the CPU."""
        ...

    def train(self, call: Train, minibatches: Sequence[Packed], how: TrainOptions | None = None) -> dict[str, Metric]:
        """One optimizer step a mini-batch (this rank's, all epochs; any may be empty). Adds one to `version`."""
        ...

    def evaluate(self, call: Train, batch: Packed) -> dict[str, Metric]:
        """The loss of held-out samples (this rank's, perhaps none) and its own metrics; no weight changes."""
        ...

    def resident_bytes(self) -> ResidentBytes:
        """Bytes of its part of the states on the device while a call runs; gradients as in the calls so far."""
        ...

    def weights(self) -> Weights:
        """Full tensors. Collective where the layout shards."""
        ...

    def local_parts(self) -> AbstractContextManager[Mapping[str, WeightPart]]:
        """The part of each weight that lies here, live and in the dtype that it is kept in; good inside."""
        ...

    @property
    def segment(self) -> WeightSegment | None:
        """The shared memory that the weights lie in; None where it is this process's own."""
        ...

    def prefetched(self) -> AbstractContextManager[int]:
        """Inside, states that wait in host memory come to the device and stay: the next call finds them there, or waits
        for them. Entering it waits for nothing. Gives their bytes."""
        ...

    def average_weights(self, parts: Parts, rate: float, version: int) -> None:
        """Move all that lies here, each part once: own + rate x (other - own), in the optimizer's precision."""
        ...

    def shared_weights(self) -> SharedWeights:
        """The live parameters, for a rollout engine beside this one. Raises ValueError where the layout shards them."""
        ...

    def snapshot(self) -> Snapshot:
        """A copy of this worker's part of the state in host memory. From any thread, while nothing trains."""
        ...

    def save(self, folder: RunPath) -> None:
        """Write this worker's share of weights (as Hugging Face has them), optimizer and counters. Raises OSError."""
        ...

    def load(self, folder: RunPath) -> None:
        """Take back what `save` wrote, bit for bit."""
        ...


@dataclass(frozen=True)
class Request:
    """One sample to generate. seed: of its own random stream, so that its neighbours do not change it.
    stop_tokens end the sample and belong to it; temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary.
    drawn: its first tokens, which another engine has drawn; they count in max_new_tokens."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    drawn: DrawnTokens | None = None


@dataclass(frozen=True)
class Completion:
    """A finished sample: the new tokens, for each its log-probability under the distribution it was drawn from
    (temperature and truncation applied) and the weight version that drew it. routes: [prompt and new tokens, layers of
    experts, experts a token] of a role with `routing_replay`, the experts that each went to; the last one to none yet.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finished: bool  # ended by a stop token or string, not by max_new_tokens
    routes: Tensor | None = None


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds of one engine. Lengths and tokens count prompt and response. max_running: default: 1,024. max_length: of a
    sequence; default: the model's positions. max_cache_tokens: of all that run, taken in pages; default: only bounded
    by max_running. prefill_tokens: of one forward pass, padding included, and of the new prompts that one step takes
    in. cuda_graphs: replay decode steps. own_stream: steps of several workers run on a CUDA stream apart."""

    max_running: int | None = None
    max_length: int | None = None
    max_cache_tokens: int | None = None
    prefill_tokens: int = 4096
    cuda_graphs: bool = True
    own_stream: bool = False


@dataclass(frozen=True)
class EngineStatus:
    """The load and the health of a rollout engine, as of now. running: sequences that decode. waiting: those that have
    no place yet. version: of the weights. free_cache_tokens: room in the key-value cache; None: unbounded or untold.
    failure: what has ended generation, if any. drawn_tokens: of all that run, with their prompts'. address: of a server
    that generates; "" where the worker does."""

    running: int
    waiting: int
    version: int
    free_cache_tokens: int | None = None
    failure: Exception | None = None
    drawn_tokens: int = 0
    address: str = ""


CacheUse = Literal["recompute", "keep"]  # what running requests do with their caches when new weights come


class EngineClosed(Exception):
    """The rollout engine was closed while its caller waited."""


class RolloutEngine(Protocol):
    """Generates beside its callers, who never wait for more than the decode step in hand; they call it from one thread
    at a time, `status` and `close` from any.

    Where generation fails it ends: `take` raises the error, and so does every later `submit`.
    """

    @property
    def version(self) -> int:
        """Version of the weights, which the next tokens will carry."""
        ...

    @property
    def source(self) -> Path | None:
        """The folder that its model came from, which may hold a generation config."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that its weights lie on, or are sent to."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that can never run (longer than the model's positions)."""
        ...

    def take(self, timeout: float) -> list[Completion]:
        """The stream of what has finished since the last `take`, each sample once; waits for the first of it, `timeout`
        seconds at most. Raises what has ended generation, EngineClosed after `close`."""
        ...

    def drawn(self, since: Mapping[int, int]) -> Sequence[DrawnTokens]:
        """The tokens of these requests, as far as they have not ended, beyond so many of each that are known."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Forget these requests: running, queued, or finished and not yet taken."""
        ...

    def pause(self) -> None:
        """Stop at the next token: then the device is the caller's. Raises TimeoutError where a step does not end."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def set_aside(self) -> AbstractContextManager[None]:
        """Inside, the engine has no request, nothing to take, and is not paused. Afterwards all is as before: the
        requests it had go on with their tokens, their caches recomputed; nothing of them is lost or drawn again."""
        ...

    def follow(self) -> None:
        """Inside a pause, on a worker that generates with others: take part in what their heads do until all of those
        have called `dismiss`; then it is as before. Raises what has ended generation."""
        ...

    def dismiss(self) -> None:
        """On a head: whoever calls `follow`, or will, goes on as far as this head is asked. Takes part in what other
        heads do until they have dismissed, too. Raises what has ended generation."""
        ...

    def weight_specs(self) -> Sequence[WeightSpec]:
        """All of its weights, in the order in which they are sent."""
        ...

    def resident_bytes(self) -> ResidentBytes:
        """Bytes of its weights while they are on the device."""
        ...

    def prepare(self, parts: Parts) -> None:
        """Take new weights, part by part, each once; for weights of its own. No token is drawn until `switch`, unless
        they lie beside the old ones. Raises ValueError for parts that are missing or have no place."""
        ...

    def switch(self, version: int, cache: CacheUse = "recompute") -> None:
        """Generate under the weights that were prepared, or that changed in place where they are shared. Running
        requests go on with their tokens; tokens from here on carry `version`. recompute: their caches are
        computed again under the new weights. keep: they go on over the caches that the old weights made, as far as
        those stay; requests that begin later share nothing with them."""
        ...

    def checksums(self) -> Tensor:
        """[weights] int64, in the order of `weight_specs`: of the part of each that lies here, by `checksum`."""
        ...

    def release(self, *, weights: bool) -> None:
        """Give up the memory of caches, and of weights that wait in host memory. Requests that are left go on with
        their tokens; workers that generate together all give theirs up before the next step. weights: that of all
        weights, those of another engine left aside: until `switch` no token is drawn, and the version is RELEASED."""
        ...

    def load(self, folder: RunPath) -> None:
        """Prepare the weights that `TrainEngine.save` wrote, and switch to their version; for weights of its own."""
        ...

    def status(self) -> EngineStatus:
        """Load and health, without waiting."""
        ...

    def close(self, timeout: float) -> bool:
        """End generation for good. False where the decode step in hand does not end within `timeout` seconds."""
        ...
