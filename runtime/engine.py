"""The two small interfaces behind which engines live. Worker side; owns no process and no socket."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from realgraph.graphs.spec import Train
from realgraph.runtime.batch import Packed
from realgraph.runtime.wire.protocol import Metric


class TrainEngine(Protocol):
    """One role's weights on one data-parallel rank. Runs one call at a time; every rank of the mesh calls it alike."""

    version: int  # completed train calls

    def inference(self, batch: Packed, output: Literal["logprobs", "values", "scores"], temperature: float) -> Tensor:
        """[T] for logprobs and values, [N] for scores; micro-batched inside; float32, on the CPU."""
        ...

    def train(self, call: Train, minibatches: Sequence[Packed]) -> dict[str, Metric]:
        """One optimizer step a mini-batch (this rank's shares, all epochs; any may be empty). Adds one to `version`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by their Hugging Face names, in a fixed order. Collective where the layout shards."""
        ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take weights in place."""
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


class RolloutEngine(Protocol):
    """Takes requests while others run. `step` is one decode step of all that runs: the worker's thread calls it."""

    version: int

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

    def update(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Weights changed (None: in place, the module is shared). Running requests go on under the new ones, their
        caches recomputed; tokens from here on carry `version`."""
        ...
