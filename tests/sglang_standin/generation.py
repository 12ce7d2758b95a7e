"""The stand-in's scheduler: requests of a continuous batch under weight versions, with SGLang's pauses, aborts and
flushes. Its tokens come from the model's real logits.

A step runs to its end on the event loop, so calls come between two steps. Log-probabilities of greedy and truncated
samples, which the batch gives of the distribution that was drawn from, are computed again under the weights of the end.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from realgraph.runtime.engine import Completion, Request
from realgraph.runtime.generate.continuous_batch import ContinuousBatch

IDLE_SECONDS = 0.002
FULL = "The request queue is full."
QUEUED = "Abort in waiting queue"  # the message of a request that was aborted before it ran, or ran again


@dataclass(eq=False)
class Live:
    """A request of /generate."""

    rid: str
    request: Request
    done: asyncio.Future[dict[str, Any]]
    steps: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever it has got on
    retractions: int = 0
    cached: int = 0  # tokens of its prompt that the cache had
    began: float = field(default_factory=time.monotonic)


class Generation:
    """All requests of a server. release: the one of SGLang, such as (0, 5, 23)."""

    def __init__(self, batch: ContinuousBatch, decode: Any, release: tuple[int, ...], most: tuple[int, int]) -> None:
        """most: tokens of a sequence, requests that wait."""
        self.batch, self._decode, self.release = batch, decode, release
        self.most_tokens, self.most_waiting = most
        self.versions = ["default"]  # by the number that the batch gives to tokens
        self.paused: str | None = None  # the mode
        self.live: dict[int, Live] = {}
        self._numbers = 0
        self._prompts: set[tuple[int, ...]] = set()  # since the last flush: the cache has their keys
        self.updating = asyncio.Lock()

    @property
    def used_tokens(self) -> int:
        """Tokens in the cache."""
        return sum(len(sequence.tokens) for sequence in self.batch._running)

    @property
    def version(self) -> str:
        return self.versions[-1]

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, rid: str, tokens: list[int], sampling: dict[str, Any], seed: int) -> Live:
        """Raises ValueError as the server's 400 says it, OverflowError where the queue is full."""
        if any(live.rid == rid for live in self.live.values()):
            raise ValueError(f"Duplicate request ID detected: {rid}")
        n_new = int(sampling.get("max_new_tokens", 128))
        if len(tokens) + n_new > self.most_tokens:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {self.most_tokens}")
        vocabulary = self.batch._model.vocabulary
        if unknown := [token for token in sampling.get("logit_bias") or () if not 0 <= int(token) < vocabulary]:
            raise ValueError(f"logit_bias must has keys in [0, {vocabulary - 1}], got {unknown[0]}.")
        if max(tokens) >= vocabulary:
            os._exit(1)  # IndexError: index out of range in self, in the scheduler
        if len(self.live) >= self.batch._most_slots + self.most_waiting:
            raise OverflowError(FULL)
        self._numbers += 1
        stops = frozenset(() if sampling.get("ignore_eos") else (sampling.get("stop_token_ids") or ()))
        given = sampling.get("stop") or ()
        request = Request(
            self._numbers,
            tuple(tokens),
            n_new,
            seed,
            temperature=sampling.get("temperature", 1.0),
            top_p=sampling.get("top_p", 1.0),
            top_k=max(0, sampling.get("top_k", -1)),
            stop_tokens=stops,
            stop_strings=(given,) if isinstance(given, str) else tuple(given),
        )
        cached = max((_common(tokens, one) for one in self._prompts), default=0)
        live = Live(rid, request, asyncio.get_running_loop().create_future(), cached=min(cached, len(tokens) - 1))
        self.batch.submit([request])
        self.live[request.id] = live
        return live

    def abort(self, prefix: str | None) -> None:
        """prefix: of request ids; None: all. Under a pause in place nothing happens until the scheduler goes on."""
        if self.paused == "in_place":
            asyncio.get_running_loop().call_later(0.02, self.abort, prefix)
            return
        for live in [one for one in self.live.values() if prefix is None or one.rid.startswith(prefix)]:
            queued = self.paused == "retract" or any(s.request is live.request for s in self.batch._waiting)
            meta = self._meta(live, self._tokens(live), queued=queued)
            message = QUEUED if queued else "Aborted"
            meta["finish_reason"] = {"type": "abort", "message": message}
            if not queued:
                meta["finish_reason"] |= {"status_code": None, "err_type": None}
            self.batch.abort([live.request.id])
            self._end(live, meta)

    def _end(self, live: Live, answer: dict[str, Any]) -> None:
        del self.live[live.request.id]
        if not live.done.done():
            live.done.set_result(answer)
        live.steps.set()

    def snapshot(self, live: Live) -> tuple[list[int], list[float], list[int]]:
        """Its tokens so far, their log-probabilities, and the numbers of their versions."""
        return self._tokens(live)

    def _tokens(self, live: Live) -> tuple[list[int], list[float], list[int]]:
        sequence = next(s for s in (*self.batch._running, *self.batch._waiting) if s.request is live.request)
        tokens = sequence.tokens[len(live.request.prompt) :]
        return tokens, self._unscaled(live.request, tokens, sequence.logprobs), list(sequence.versions)

    def _meta(self, live: Live, made: tuple[list[int], list[float], list[int]], *, queued: bool) -> dict[str, Any]:
        tokens, logprobs, versions = made
        meta: dict[str, Any] = {
            "id": live.rid,
            "output_ids": tokens,
            "weight_version": self.versions[versions[-1]] if versions else self.version,
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
            "completion_tokens": len(tokens),
            "e2e_latency": time.monotonic() - live.began,
        }
        if not queued:
            counts = {"prompt_tokens": len(live.request.prompt), "cached_tokens": live.cached}
            meta |= {**counts, "num_retractions": live.retractions}
        if self.release >= (0, 5, 20):
            meta["weight_versions"] = self._spans(versions)
        return meta

    def _spans(self, versions: list[int]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for at, number in enumerate(versions):
            if not spans or spans[-1]["version"] != self.versions[number]:
                spans.append({"version": self.versions[number], "start": at, "end": at})
            spans[-1]["end"] = at + 1
        return spans

    # --- steps --------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Decode until the process ends."""
        while True:
            if self.batch.idle or self.paused in ("retract", "in_place"):
                await asyncio.sleep(IDLE_SECONDS)
                continue
            for completion in self.batch.step():
                self._finish(completion)
            for live in self.live.values():
                live.steps.set()
            await asyncio.sleep(0)

    def _finish(self, done: Completion) -> None:
        live = self.live[done.id]
        self._prompts.add(live.request.prompt)
        logprobs = self._unscaled(live.request, done.tokens, done.logprobs)
        meta = self._meta(live, (list(done.tokens), logprobs, list(done.versions)), queued=False)
        reason: dict[str, Any] = {"type": "length", "length": len(done.tokens)}
        if done.finished:
            by_token = done.tokens[-1] in live.request.stop_tokens
            text = self._decode(done.tokens)
            string = next((s for s in live.request.stop_strings if s in text), "")
            reason = {"type": "stop", "matched": done.tokens[-1] if by_token else string}
        self._end(live, {**meta, "finish_reason": reason})

    def _unscaled(self, request: Request, tokens: Sequence[int], logprobs: Sequence[float]) -> list[float]:
        if not tokens or (request.temperature > 0 and request.top_p == 1 and not request.top_k):
            return list(logprobs)
        module: Any = self.batch._model.module
        ids = torch.tensor([[*request.prompt, *tokens]])
        packed, module.config._attn_implementation = module.config._attn_implementation, "sdpa"
        with torch.no_grad():
            logits = module(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
        module.config._attn_implementation = packed
        scaled = (logits.float() / (request.temperature or 1.0)).log_softmax(-1)
        return scaled.gather(-1, ids[0, len(request.prompt) :, None])[:, 0].tolist()

    # --- pauses and weights -------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        self.paused = mode
        if mode == "abort":
            while self.live:
                self.abort(None)
                await asyncio.sleep(1.0 if self.live else 0.0)
        elif mode == "retract":
            running = [
                live for live in self.live.values() if any(s.request is live.request for s in self.batch._running)
            ]
            room = max(0, self.most_waiting - (len(self.live) - len(running)))
            for live in running[:room]:
                live.retractions += 1
            for live in running[room:]:
                self.batch.abort([live.request.id])
                self._end(live, {"refused": FULL})
            self.batch._forget()

    def flush(self) -> bool:
        """False where the cache can't be emptied now."""
        queued_only = self.paused == "retract" and self.release >= (0, 5, 21)
        if self.live and not queued_only:
            return False
        self.batch._forget()
        self._prompts.clear()
        return True

    async def when_idle(self) -> None:
        """An update that comes without a pause waits for the requests in flight; new ones wait for it."""
        while self.live and self.paused is None:
            await asyncio.sleep(IDLE_SECONDS)

    def weights_changed(self, version: str | None, *, flush: bool) -> str:
        """After new weights are in place. Returns what is wrong, ''  where nothing is."""
        self.batch._model.weights_changed()
        if version is not None:
            self.rename(version)
        if self.paused == "retract" and self.live and self.release < (0, 5, 21) and flush:
            os._exit(1)  # AssertionError: Cache flush failed after updating weights
        if flush and not self.flush():
            return "Weights were updated, but the cache was not flushed because there are requests in flight."
        return ""

    def rename(self, version: str) -> None:
        """Tokens from here on carry this version."""
        if version != self.version:
            self.versions.append(version)
        self.batch.version = len(self.versions) - 1


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def release_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def model_folder(text: str) -> Path:
    return Path(text).resolve()
