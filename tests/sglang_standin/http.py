"""As much of HTTP/1.1 as the stand-in needs: JSON in, JSON or a stream of events out, connections kept open."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Internal Server Error"}


@dataclass(frozen=True)
class Call:
    """A request."""

    method: str
    path: str
    body: dict[str, Any]
    query: dict[str, str]
    key: str  # of the header Authorization
    gone: Callable[[], bool]  # the client has closed the connection


@dataclass(frozen=True)
class Answer:
    """A response: a body, or events one after the other. cut: bytes of the body after which the connection ends."""

    status: int = 200
    body: bytes = b""
    events: AsyncIterator[Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


def of_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), headers={"Content-Type": "application/json"})


def refused(message: str, status: int = 400) -> Answer:
    """An error as FastAPI and SGLang write it."""
    return of_json({"error": {"message": message}}, status)


Handler = Callable[[Call], Awaitable[Answer]]


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler) -> None:
    """Answer the requests of one connection until its client closes it."""
    try:
        while (call := await _read(reader)) is not None:
            answer = await handle(call)
            print(f'"{call.method} {call.path} HTTP/1.1" {answer.status}', flush=True)  # as SGLang's log has it
            if not await _write(writer, answer):
                break
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client is gone
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Call | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    path, _, query = target.partition("?")
    pairs = {name: value for name, _, value in (pair.partition("=") for pair in query.split("&") if pair)}
    key = headers.get("authorization", "").removeprefix("Bearer ")
    return Call(method, path, json.loads(body) if body else {}, pairs, key, reader.at_eof)


async def _write(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """False where the connection ends after it."""
    status = f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Service Unavailable')}\r\n"
    headers = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    if answer.events is None:
        sent = answer.body if answer.cut is None else answer.body[: answer.cut]
        writer.write(f"{status}{headers}Content-Length: {len(answer.body)}\r\n\r\n".encode() + sent)
        await writer.drain()
        return answer.cut is None
    writer.write(f"{status}Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    async for event in answer.events:
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()
        if answer.cut is not None:
            return False
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True
