"""Answers of /generate as tokens, log-probabilities and the versions that drew them; checked as far as they can be."""

import uuid
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from realgraph.runtime.rollout.messages import GenerateAnswer, MetaInfo
from realgraph.runtime.rollout.versions import VersionLog, VersionSpan, span_of_one


class Answer(Struct, frozen=True):
    """A sequence that has ended.

    logprobs: of each token, under temperature, truncation by top_p and top_k left out (they do not renormalise);
    greedy: under temperature 1. spans: cover all tokens, without a gap.
    """

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    reason: Literal["stop", "length", "abort"]
    message: str = ""  # of an abort
    matched: int | str | None = None  # the token that ended it, which is the last of the tokens; or the text
    cached_tokens: int | None = None  # of the prompt, found in the prefix cache; aborts may lack it
    n_retractions: int | None = None  # how often it was interrupted; aborts may lack it


class AnswerPart(Struct, frozen=True):
    """The next tokens of a stream. end: the whole answer, in the last part alone; only there are versions known."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: Answer | None = None


class AnswerFault(ValueError):
    """An answer that contradicts itself, or its request."""


class VersionFault(ValueError):
    """An answer whose tokens are of weights that can't be."""


def new_rid() -> str:
    """A request id. All have one length: a server aborts every request whose id begins with the given one."""
    return uuid.uuid4().hex


class AnswerReader:
    """Makes one answer of what a server says of one request, whole or in events. since: version at its sending."""

    def __init__(self, rid: str, log: VersionLog, since: int) -> None:
        self._rid = rid
        self._log = log
        self._since = since
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def read(self, event: GenerateAnswer) -> AnswerPart:
        """The next part. Raises AnswerFault or VersionFault."""
        meta = event.meta_info
        if meta.id != self._rid:
            raise AnswerFault(f"an answer to {meta.id!r}, expected one to {self._rid!r}")
        tokens, values = self._new(event)
        self._tokens += tokens
        self._logprobs += values
        return AnswerPart(tokens, values, self._end(meta))

    def _new(self, event: GenerateAnswer) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens that were not there before, and their log-probabilities.

        Events show all tokens so far, or the new ones alone (--incremental-streaming-output), where the abort of a
        waiting request shows the last token once more, behind those that were not sent yet.
        """
        shown, meta, n_before = event.output_ids, event.meta_info, len(self._tokens)
        n_all = meta.completion_tokens
        if n_all is None:  # of aborts in old releases, which show all
            n_all = max(len(shown), n_before)
        n_new = n_all - n_before
        logprobs = (meta.output_token_logprobs or ())[-n_new:] if n_new > 0 else ()
        if len(logprobs) < n_new:
            raise AnswerFault(f"{n_new} new tokens with {len(logprobs)} log-probabilities")
        tokens = tuple(token for _, token, _ in logprobs)
        so_far = (*self._tokens, *tokens)
        forms = [so_far, tokens, (*tokens, *so_far[-1:])][: 2 if meta.finish_reason is None else 3]
        if n_new < 0 or shown not in forms:
            text = f"shows {len(shown)} tokens of {n_all} that do not continue the {n_before} before"
            raise AnswerFault(f"{text}, or has log-probabilities of other tokens")
        return tokens, tuple(value for value, _, _ in logprobs)

    def _end(self, meta: MetaInfo) -> Answer | None:
        reason = meta.finish_reason
        if reason is None:
            return None
        return Answer(
            self._rid,
            tuple(self._tokens),
            tuple(self._logprobs),
            self._spans(meta),
            reason.type,
            reason.message or "",
            reason.matched,
            meta.cached_tokens,
            meta.num_retractions,
        )

    def _spans(self, meta: MetaInfo) -> tuple[VersionSpan, ...]:
        n_tokens = len(self._tokens)
        if meta.weight_versions is None:
            version = meta.weight_version or ""
            if n_tokens == 0:
                return ()
            spans = span_of_one(self._since, self._log, version, n_tokens)
            if spans is None:
                text = f"tokens of weights {version!r} alone, and weights {self._since} to {self._log.newest} can be"
                raise VersionFault(f"{text}: servers before 0.5.20 do not say which tokens are of which")
            return spans
        given = [(span.version, span.start, span.end) for span in meta.weight_versions]
        if not all(version.isdecimal() for version, _, _ in given):
            raise VersionFault(f"tokens of weights {[version for version, _, _ in given]}, expected numbers")
        spans = tuple(VersionSpan(int(version), start, end) for version, start, end in given if start < end)
        if not _covers(spans, n_tokens):
            raise AnswerFault(f"{n_tokens} tokens with the version spans {given}")
        if fault := self._log.fault(spans, self._since):
            raise VersionFault(fault)
        return spans


def _covers(spans: Sequence[VersionSpan], n_tokens: int) -> bool:
    """True where the spans follow one another from 0 to n_tokens."""
    edges = [0, *(span.end for span in spans)]
    return [span.start for span in spans] == edges[:-1] and edges[-1] == n_tokens
