"""A sample while a server generates it: asked for as often as it takes, its tokens kept with their versions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from realgraph.runtime.data.stops import says_stop
from realgraph.runtime.drawn.tokens import DrawnTokens, pack
from realgraph.runtime.engine import Completion, Decode, Request
from realgraph.runtime.rollout.answers import Answer, AnswerPart, new_rid
from realgraph.runtime.rollout.messages import GenerateRequest, SamplingParams

MOST_EMPTY = 8  # answers one after the other that end without a token


class AnswerWrong(ValueError):
    """An answer that can't be one to its request."""


@dataclass(eq=False)
class GrowingSample:
    """One request. The first `certain` of its tokens have their versions: those outlive a server's death; whatever is
    drawn again is drawn anew.

    vocabulary: token ids below it can be.
    """

    request: Request
    vocabulary: int
    decode: Decode | None = None  # for stop strings
    rid: str = ""  # of what a server generates now
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)  # tokens of the answer in hand, their versions not yet told
    finished: bool = False  # by a stop token or string
    ended: bool = False
    certain_seen: int = 0  # of `seen`: drawn under the one version there was
    asked_version: int = 0  # that one, of the answer in hand
    _values: list[float] = field(default_factory=list)  # log-probabilities of `seen`
    _empty: int = 0

    def __post_init__(self) -> None:
        if self.request.drawn is not None:  # another engine has
            self.tokens, self.logprobs, self.versions = self.request.drawn.lists()

    def drawn(self, start: int) -> DrawnTokens:
        """Its tokens with known versions from the `start`-th on."""
        n = self.certain_seen
        tokens, logprobs = self.tokens + self.seen[:n], self.logprobs + self._values[:n]
        versions = self.versions + [self.asked_version] * n
        return pack(self.request.id, tokens[start:], logprobs[start:], versions[start:], start)

    @property
    def n_tokens(self) -> int:
        """Its tokens so far, with those of the prompt."""
        return len(self.request.prompt) + len(self.tokens) + len(self.seen)

    def ask(self, *, stream: bool) -> GenerateRequest:
        """The request for what is left of it."""
        request, self.rid = self.request, new_rid()
        self.seen, self._values, self.certain_seen = [], [], 0
        sampling = SamplingParams(
            max_new_tokens=request.max_new_tokens - len(self.tokens),
            temperature=request.temperature,
            stop=request.stop_strings or None,
            stop_token_ids=tuple(sorted(request.stop_tokens)) or None,
            ignore_eos=not request.stop_tokens,  # else the model's own ends count besides: see `close`
        )
        return GenerateRequest(self.rid, (*request.prompt, *self.tokens), sampling, stream=stream)

    def add(self, part: AnswerPart, version: int | None) -> bool:
        """Take the next tokens. version: of all that this answer has so far; None: not known before its end. True where
        a stop string ends it here, although the server goes on. Raises AnswerWrong."""
        for token, value in zip(part.tokens, part.logprobs, strict=True):
            if not 0 <= token < self.vocabulary:
                raise AnswerWrong(f"token {token} is none of a vocabulary of {self.vocabulary}")
            if not math.isfinite(value):
                raise AnswerWrong(f"the log-probability of token {len(self.tokens) + len(self.seen)} is {value}")
            self.seen.append(token)
            self._values.append(value)
        if version is not None:
            self.certain_seen = len(self.seen)
        if len(self.tokens) + len(self.seen) > self.request.max_new_tokens:
            text = f"{len(self.seen)} tokens, where {self.request.max_new_tokens - len(self.tokens)} were asked for"
            raise AnswerWrong(text)
        if part.end is not None:
            self._close(part.end)
            return False
        return self._cut_at(len(part.tokens)) is not None

    def stop_here(self, version: int) -> bool:
        """End an answer at the stop string that its tokens hold, the server left aside. False where their versions are
        not known: then its end is to be waited for."""
        at = self._cut_at(len(self.seen))
        if at is None or at > self.certain_seen:
            return False
        self._keep(at, [version] * at)
        self.finished = self.ended = True
        return True

    def lost(self, version: int) -> None:
        """The answer breaks off: keep what can have been drawn under `version` alone."""
        self._keep(self.certain_seen, [version] * self.certain_seen)

    def completion(self) -> Completion:
        """The finished sample; greedy tokens have probability 1."""
        greedy = self.request.temperature == 0
        logprobs = (0.0,) * len(self.tokens) if greedy else tuple(self.logprobs)
        return Completion(self.request.id, tuple(self.tokens), logprobs, tuple(self.versions), self.finished)

    def _close(self, answer: Answer) -> None:
        """The answer has come to its end, which need not be the sample's."""
        versions = [span.version for span in answer.spans for _ in range(span.start, span.end)]
        if len(versions) != len(self.seen):
            raise AnswerWrong(f"{len(self.seen)} tokens with the versions of {len(versions)}")
        left = self.request.max_new_tokens - len(self.tokens)
        if answer.reason == "length" and len(self.seen) < left:
            raise AnswerWrong(f"ends for its length with {len(self.seen)} tokens, where {left} were asked for")
        self._empty = 0 if self.seen else self._empty + 1
        if self._empty >= MOST_EMPTY:
            raise AnswerWrong(f"{MOST_EMPTY} answers one after the other have no token: {answer.message}")
        at = self._cut_at(len(self.seen))
        self._keep(len(self.seen) if at is None else at, versions)
        # what the server takes for an end and we do not (an end of sequence of its model, a text) goes on
        own = bool(self.tokens) and self.tokens[-1] in self.request.stop_tokens
        self.finished = at is not None or own
        self.ended = self.finished or len(self.tokens) == self.request.max_new_tokens

    def _cut_at(self, newest: int) -> int | None:
        """Tokens of the answer up to the first that completes a stop string, where one of the `newest` does: there the
        embedded engine ends a sample."""
        if not self.request.stop_strings:
            return None
        assert self.decode is not None, "stop strings were let in without a decoder"
        for at in range(len(self.seen) - newest + 1, len(self.seen) + 1):
            if says_stop([*self.tokens, *self.seen[:at]], self.request.stop_strings, self.decode):
                return at
        return None

    def _keep(self, n: int, versions: Sequence[int]) -> None:
        self.tokens += self.seen[:n]
        self.logprobs += self._values[:n]
        self.versions += versions[:n]
        self.seen, self._values, self.certain_seen = [], [], 0
