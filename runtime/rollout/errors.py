"""Errors of calls to an SGLang server. Each names the server, the endpoint, the status and how the answer begins."""

_SHOWN_BYTES = 300  # of an answer
RETRY_STATUS = 503  # of a request that the server has no place for now


class SglangError(Exception):
    """A call that a server did not answer as its interface says.

    status: of HTTP; None where no answer came. beginning: of the answer.
    """

    def __init__(self, server: str, endpoint: str, text: str, status: int | None = None, answer: bytes = b"") -> None:
        self.server = server
        self.endpoint = endpoint
        self.status = status
        self.beginning = answer[:_SHOWN_BYTES].decode(errors="replace")
        shown = f"; the answer begins {self.beginning!r}" if answer else ""
        super().__init__(f"SGLang server {server} {endpoint}: {text}{shown}")


class ServerUnreachable(SglangError):
    """No connection, or one that broke before the answer was whole: the server may have ended."""


class ServerSilent(SglangError):
    """No answer within the deadline."""


class CallRefused(SglangError):
    """The server has answered that it did not do what it was asked."""


class QueueFull(CallRefused):
    """The server has no place for a request now. The same request may be sent again later, or elsewhere."""


class UnreadableAnswer(SglangError):
    """An answer that is not what this endpoint gives: garbage, or half of a stream."""


class WrongVersion(SglangError):
    """Tokens of weights that this server was not given, or not yet, or no longer had when the request was sent."""


class ServerNotStarted(SglangError):
    """A server of ours that has ended, or was late, before it was ready. The text holds the end of its log."""
