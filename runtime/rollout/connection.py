"""JSON over HTTP to one server: every call has a deadline, and every failure is an SglangError."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx2
import msgspec

from realgraph.runtime.rollout.errors import (
    RETRY_STATUS,
    CallRefused,
    QueueFull,
    ServerSilent,
    ServerUnreachable,
    SglangError,
    UnreadableAnswer,
)

MAX_ANSWER_BYTES = 1 << 28  # checksums of a large model, or a long answer, are far below
IDLE_SECONDS = 2.0  # a connection is used again; uvicorn closes what has been idle for five
_EVENT, _DONE = b"data:", b"[DONE]"

Answered = TypeVar("Answered")


class Connection:
    """One server's endpoints. Belongs to one asyncio loop; any number of calls at once."""

    def __init__(self, url: str, key: str, connect_seconds: float) -> None:
        self.url = url.rstrip("/")
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(None, connect=connect_seconds),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_SECONDS),
            trust_env=False,  # no proxy, and no key of a .netrc
        )

    async def close(self) -> None:
        """Hang up: calls that are open fail, and the server drops their requests."""
        await self._http.aclose()

    async def get(self, endpoint: str, kind: type[Answered], seconds: float) -> Answered:
        """Ask. Raises SglangError."""
        return self.decode(endpoint, await self.ask(endpoint, seconds), kind)

    async def ask(self, endpoint: str, seconds: float) -> bytes:
        """Ask; returns the answer as it is. Raises SglangError."""
        return await self._call("GET", endpoint, b"", seconds)

    async def post(self, endpoint: str, body: object, kind: type[Answered], seconds: float) -> Answered:
        """Send, and read the answer. Raises SglangError."""
        return self.decode(endpoint, await self.send(endpoint, body, seconds), kind)

    async def send(self, endpoint: str, body: object, seconds: float) -> bytes:
        """Send; returns the answer as it is. Raises SglangError."""
        return await self._call("POST", endpoint, msgspec.json.encode(body), seconds)

    async def events(self, endpoint: str, body: object, seconds: float) -> AsyncGenerator[bytes, None]:
        """The events of a stream, up to its end mark. seconds: until the next one. Raises SglangError."""
        buffer, ended = bytearray(), False
        async with self._open("POST", endpoint, msgspec.json.encode(body), seconds) as answer:
            pieces = answer.aiter_bytes()
            while (piece := await self._next(endpoint, pieces, seconds)) is not None:
                buffer += piece
                if len(buffer) > MAX_ANSWER_BYTES:
                    raise self.unreadable(endpoint, f"an event of over {MAX_ANSWER_BYTES} bytes", bytes(buffer))
                *lines, rest = buffer.split(b"\n")
                buffer = bytearray(rest)
                for line in map(bytes.strip, map(bytes, lines)):
                    if line and (ended or not line.startswith(_EVENT)):
                        raise self.unreadable(endpoint, "expected a line of a stream", line)
                    data = line.removeprefix(_EVENT).strip()
                    ended = ended or data == _DONE
                    if data and not ended:
                        yield data
        if not ended:
            raise ServerUnreachable(self.url, endpoint, "the stream ends before its end mark", 200, bytes(buffer))

    def decode(self, endpoint: str, answer: bytes, kind: type[Answered]) -> Answered:
        """An answer as what it has to be. Raises UnreadableAnswer."""
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.unreadable(endpoint, f"expected {_name(kind)}: {error}", answer) from error

    def unreadable(self, endpoint: str, text: str, answer: bytes) -> UnreadableAnswer:
        """The error of an answer that has come and is not what it has to be."""
        return UnreadableAnswer(self.url, endpoint, text, 200, answer)

    async def _call(self, method: str, endpoint: str, body: bytes, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds), self._open(method, endpoint, body, seconds) as answer:
                return await self._read(endpoint, answer)
        except TimeoutError as error:
            raise self._silent(endpoint, seconds) from error

    @asynccontextmanager
    async def _open(self, method: str, endpoint: str, body: bytes, seconds: float) -> AsyncIterator[httpx2.Response]:
        """An answer of status 200, of which the head is there."""
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request(method, self.url + endpoint, content=body or None, headers=headers)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._http.send(request, stream=True)
        except httpx2.ConnectTimeout as error:
            raise ServerUnreachable(self.url, endpoint, "nothing takes the connection") from error
        except httpx2.HTTPError as error:
            raise ServerUnreachable(self.url, endpoint, str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise self._silent(endpoint, seconds) from error
        try:
            if answer.status_code != 200:
                raise await self._refused(endpoint, answer, seconds)
            yield answer
        finally:
            await answer.aclose()

    async def _read(self, endpoint: str, answer: httpx2.Response) -> bytes:
        """The whole body."""
        body, status = bytearray(), answer.status_code
        try:
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise self.unreadable(endpoint, f"an answer of over {MAX_ANSWER_BYTES} bytes", bytes(body))
        except httpx2.HTTPError as error:
            text = f"the answer breaks off after {len(body)} bytes: {error}"
            raise ServerUnreachable(self.url, endpoint, text, status, bytes(body)) from error
        return bytes(body)

    async def _next(self, endpoint: str, pieces: AsyncIterator[bytes], seconds: float) -> bytes | None:
        """The next piece of a stream; None at its end."""
        try:
            async with asyncio.timeout(seconds):
                return await anext(pieces, None)
        except TimeoutError as error:
            raise self._silent(endpoint, seconds) from error
        except httpx2.HTTPError as error:
            raise ServerUnreachable(self.url, endpoint, f"the stream breaks off: {error}", 200) from error

    def _silent(self, endpoint: str, seconds: float) -> ServerSilent:
        return ServerSilent(self.url, endpoint, f"no answer in {seconds:g} s")

    async def _refused(self, endpoint: str, answer: httpx2.Response, seconds: float) -> SglangError:
        try:
            async with asyncio.timeout(seconds):
                body = await self._read(endpoint, answer)
        except TimeoutError:
            return self._silent(endpoint, seconds)
        kind = QueueFull if answer.status_code == RETRY_STATUS else CallRefused
        text = f"answered {answer.status_code} {answer.reason_phrase}"
        return kind(self.url, endpoint, text, answer.status_code, body)


def _name(kind: object) -> str:
    return getattr(kind, "__name__", str(kind))
