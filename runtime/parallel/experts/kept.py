"""The experts that generation chooses, token by token, as training replays them. Knows no cache and no request.

A token is given its experts once, by the first pass that computes it; every later pass over it, here or in training,
takes them again. Source: rollout routing replay (R3), arXiv:2510.11370: choices are replayed, their weights are those
of the pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from realgraph.runtime.parallel.experts.block import blocks_by_chunk
from realgraph.runtime.parallel.experts.routing import RoutingRecord, record_of, route_dtype
from realgraph.runtime.parallel.groups import Ranks
from realgraph.runtime.parallel.pipeline.stage import stage_of

Choices = NDArray[Any]  # [tokens, layers of experts, experts a token] of `route_dtype`
_ROOM = 64  # tokens more than there are, where memory is taken


class TokenRoutes:
    """The choices of tokens that follow each other, of the layers of experts that are here."""

    def __init__(self, like: Choices) -> None:
        """like: [0, layers, k]."""
        self._room, self._n = like, 0

    def take(self, start: int, rows: Choices) -> None:
        """A pass has computed tokens `start`, `start` + 1, ...; those before have been taken. Tokens that have choices
        keep them."""
        end = start + len(rows)
        if end > len(self._room):
            room = np.empty((max(end + _ROOM, 2 * len(self._room)), *rows.shape[1:]), rows.dtype)
            room[: self._n] = self.kept
            self._room = room
        if end > self._n:
            self._room[self._n : end] = rows[self._n - start :]
            self._n = end

    @property
    def kept(self) -> Choices:
        """[tokens, layers here, k]"""
        return self._room[: self._n]


class SequenceRoutes:
    """The choices of one sequence. Those of its prompt belong to all sequences with this prompt, which share its keys;
    the prompt's last token, whose keys each has for itself, counts as a token of the sequence."""

    def __init__(self, n_prompt: int, prompt: TokenRoutes, like: Choices) -> None:
        self._n_shared, self._prompt, self._own = n_prompt - 1, prompt, TokenRoutes(like)

    def take(self, start: int, rows: Choices) -> None:
        """See `TokenRoutes.take`."""
        n_shared = max(0, self._n_shared - start)
        if n_shared:
            self._prompt.take(start, rows[:n_shared])
        if len(rows) > n_shared:
            self._own.take(start + n_shared - self._n_shared, rows[n_shared:])

    def known(self, start: int, stop: int) -> Choices:
        """[n, layers here, k]: of tokens `start` to `stop`, as many of them as have choices."""
        shared, own = self._prompt.kept[start : min(stop, self._n_shared)], self._own.kept
        if stop <= self._n_shared:
            return shared
        return np.concatenate([shared, own[max(0, start - self._n_shared) : stop - self._n_shared]])

    @property
    def kept(self) -> Choices:
        """[tokens, layers here, k]: of all tokens that were computed."""
        return self.known(0, self._n_shared + len(self._own.kept))


@dataclass(frozen=True)
class RouteSpan:
    """Tokens `start` to `start` + `count` of a sequence. routes: of each chunk of layers."""

    routes: Sequence[SequenceRoutes]
    start: int
    count: int


class RouteNotes:
    """Replays and takes down the choices of generation's passes through a network (this rank's part of it)."""

    def __init__(
        self,
        record: RoutingRecord,
        layers: Sequence[Sequence[int]],
        top_k: int,
        place: tuple[torch.device, Ranks | None],
    ) -> None:
        """layers: those of experts that are here, chunk by chunk, by their numbers among all. place: the network's
        device, and the stages, where others have other layers."""
        self._record, self._chunks, (self._device, self._stages) = record, [list(chunk) for chunk in layers], place
        self._none, self._dtype, self._top_k = record.n_experts, route_dtype(record.n_experts), top_k
        self._like: list[Choices] = [
            torch.empty((0, len(chunk), top_k), dtype=self._dtype).numpy() for chunk in self._chunks
        ]
        self._prompts: WeakValueDictionary[tuple[int, tuple[int, ...]], TokenRoutes] = WeakValueDictionary()

    def sequence(self, prompt: tuple[int, ...]) -> tuple[SequenceRoutes, ...]:
        """The choices of a new sequence, chunk by chunk: of its prompt those of others that have it, too, and are not
        forgotten yet."""
        shared = [self._prompts.get((i, prompt)) or TokenRoutes(like) for i, like in enumerate(self._like)]
        self._prompts.update({(i, prompt): routes for i, routes in enumerate(shared)})
        return tuple(SequenceRoutes(len(prompt), *both) for both in zip(shared, self._like, strict=True))

    @contextmanager
    def watched(self, spans: Sequence[RouteSpan], chunk: int) -> Iterator[None]:
        """Inside, one pass over these tokens, a row of it each, padded at the end, goes through a chunk of layers.
        Tokens with choices go there again; of the others they are taken down."""
        width, layers, like = max(span.count for span in spans), self._chunks[chunk], self._like[chunk]
        self._record.replay(self._given(spans, width, chunk))
        self._record.note()
        yield
        noted = self._record.noted()
        self._record.replay(None)
        made = np.empty((len(spans), width, *like.shape[1:]), like.dtype)
        if layers:
            made[:] = torch.stack([noted[layer] for layer in layers], 1).cpu().numpy().reshape(made.shape)
        for span, rows in zip(spans, made, strict=True):
            span.routes[chunk].take(span.start, rows[: span.count])

    def _given(self, spans: Sequence[RouteSpan], width: int, chunk: int) -> Tensor | None:
        """[n x width, layers, k]: the choices that there are; None where there are none."""
        known = [span.routes[chunk].known(span.start, span.start + span.count) for span in spans]
        if not any(map(len, known)):
            return None
        shape = len(spans), width, self._record.n_layers, self._top_k
        given = np.full(shape, self._none, self._like[chunk].dtype)
        for row, rows in zip(given, known, strict=True):
            row[: len(rows), self._chunks[chunk]] = rows
        return torch.from_numpy(given).flatten(0, 1).to(self._device)

    def whole(self, ended: Sequence[Sequence[SequenceRoutes]]) -> list[Tensor]:
        """[tokens, layers, k] of sequences that have ended, all layers of experts: `route_dtype`, on the CPU. The last
        token, which no pass has computed, has no choice. Collective over the stages."""
        kept = [np.concatenate([part.kept for part in one], 1) for one in ended]
        found = torch.zeros((sum(map(len, kept)), self._record.n_layers, self._top_k), dtype=self._dtype)
        if ended:
            found[:, [layer for chunk in self._chunks for layer in chunk]] = torch.from_numpy(np.concatenate(kept))
        if ended and self._stages is not None:  # gloo knows no int16
            sums = found if self._dtype == torch.uint8 else found.int()
            found = self._stages.add(sums.to(self._device)).to("cpu", self._dtype)
        none = found.new_full((1, *found.shape[1:]), self._none)
        return [torch.cat([part, none]) for part in torch.split(found, [len(one) for one in kept])]


def route_notes(network: nn.Module) -> RouteNotes:
    """The notes of a network of experts. Raises ValueError where there is none."""
    record, stage = record_of(network), stage_of(network)
    if record is None:
        raise ValueError("routing_replay is for mixtures of experts, and this model is none")
    layers = [[block.layer for block in blocks] for blocks in blocks_by_chunk(network)]
    config: Any = network.config
    place = next(network.parameters()).device, None if stage is None else stage.ranks
    return RouteNotes(record, layers, config.num_experts_per_tok, place)
