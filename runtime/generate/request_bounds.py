"""The requests that a batch can run at all. Knows no request that runs, and no cache."""

from typing import NamedTuple

from realgraph.runtime.engine import Request


class RequestBounds(NamedTuple):
    """Bounds of every request: of token ids, of a sequence's length, and of the tokens that the whole cache has; None:
    as many as are needed. decodes: the engine can turn tokens into text."""

    vocabulary: int
    max_length: int
    cache_tokens: int | None
    decodes: bool

    def problem(self, request: Request) -> str:
        """Reason why a request can never run, '' if it can."""
        length = len(request.prompt) + request.max_new_tokens
        most = self.cache_tokens
        if not request.prompt:
            return "its prompt is empty"
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocabulary:
            return f"its prompt has tokens outside the model's vocabulary of {self.vocabulary}"
        if request.max_new_tokens < 1:
            return "max_new_tokens must be at least 1"
        if length > self.max_length:
            return f"{len(request.prompt)} prompt + {request.max_new_tokens} new tokens exceed {self.max_length}"
        if most is not None and length - 1 > most:  # the last token is never read
            return f"its {length} tokens can't fit a cache of {most} tokens"
        if request.temperature < 0 or not 0 < request.top_p <= 1 or request.top_k < 0:
            return f"temperature {request.temperature}, top_p {request.top_p}, top_k {request.top_k} are out of range"
        if request.stop_strings and not self.decodes:
            return "stop strings need an engine that can decode tokens"
        return ""
