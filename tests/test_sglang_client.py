"""The SGLang client before a server that does not answer as it should: one error each, with all that is known."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from realgraph.runtime.rollout.answers import AnswerFault, AnswerReader, VersionFault, new_rid
from realgraph.runtime.rollout.client import SglangClient
from realgraph.runtime.rollout.errors import (
    CallRefused,
    QueueFull,
    ServerSilent,
    ServerUnreachable,
    SglangError,
    UnreadableAnswer,
    WrongVersion,
)
from realgraph.runtime.rollout.messages import (
    FinishReason,
    GenerateAnswer,
    GenerateRequest,
    GivenSpan,
    MetaInfo,
    SamplingParams,
)
from realgraph.runtime.rollout.messages import Timeouts as Deadlines
from realgraph.runtime.rollout.versions import VersionLog, VersionSpan

RID = "0" * 32
DEADLINES = Deadlines(connect_seconds=1.5, control_seconds=1.5, update_seconds=1.5, answer_seconds=1.5)
INFO = {"model_path": "/models/small", "weight_version": "4"}
Reply = bytes | None  # as it goes over the wire, after which the connection is closed; None: nothing, and it stays open


def response(body: bytes | dict[str, Any], status: str = "200 OK", length: int | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + content


def stream(*events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(b"data: " + event + b"\n\n" for event in events)


def event(tokens: list[int], end: str | None = "length", version: str = "4", **changes: Any) -> dict[str, Any]:
    """An answer about a request whose tokens so far are these."""
    meta: dict[str, Any] = {
        "id": RID,
        "finish_reason": None if end is None else {"type": end},
        "completion_tokens": len(tokens),
        "weight_version": version,
        "output_token_logprobs": [[-1.0 - token, token, None] for token in tokens],
    }
    if end is not None:
        meta["weight_versions"] = [{"version": version, "start": 0, "end": len(tokens)}]
    return {"output_ids": tokens, "meta_info": {**meta, **changes}}


def ask(replies: dict[str, Reply], call: Callable[[SglangClient], Awaitable[object]]) -> object:
    """Make a call to a server that gives these replies by their endpoints; its weights are version 4."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        reply = replies.get(head.split()[1].decode(), response(INFO))
        if reply is None:
            await asyncio.sleep(60)
        else:
            writer.write(reply)
            await writer.drain()
        writer.close()

    async def main() -> object:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = SglangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret", DEADLINES)
        try:
            await client.open(4)
            return await call(client)
        finally:
            await client.close()
            server.close()

    return asyncio.run(main())


REQUEST = GenerateRequest(RID, (1, 2), SamplingParams(3))


async def whole(client: SglangClient) -> object:
    return await client.generate(REQUEST)


async def streamed(client: SglangClient) -> object:
    return [part async for part in client.stream(REQUEST)]


BAD_ANSWERS: dict[str, tuple[Reply, type[SglangError], str]] = {
    "garbage": (response(b"<html>hello"), UnreadableAnswer, "<html>hello"),
    "other JSON": (response({"text": "a"}), UnreadableAnswer, "output_ids"),
    "500": (response(b"oh no", "500 Internal Server Error"), CallRefused, "500 Internal Server Error.*oh no"),
    "401": (response({"error": "Unauthorized"}, "401 Unauthorized"), CallRefused, "401.*Unauthorized"),
    "full": (
        response({"message": "The request queue is full."}, "503 Service Unavailable"),
        QueueFull,
        "queue is full",
    ),
    "nothing": (b"", ServerUnreachable, "disconnect"),
    "half": (response(b'{"output_ids": [1', length=999), ServerUnreachable, "breaks off after 17 bytes"),
    "silence": (None, ServerSilent, "no answer in 1.5 s"),
    "no end": (response(event([1, 2], None)), UnreadableAnswer, "without a finish reason"),
    "another's": (response(event([1, 2], id="f" * 32)), UnreadableAnswer, "expected one to '0000"),
    "no logprobs": (response(event([1, 2], output_token_logprobs=None)), UnreadableAnswer, "0 log-probabilities"),
    "null": (response(event([1], output_token_logprobs=[[None, 1, None]])), UnreadableAnswer, "got `null`"),
    "others": (response(event([1], output_token_logprobs=[[-1.0, 2, None]])), UnreadableAnswer, "other tokens"),
    "gap": (
        response(event([1, 2], weight_versions=[{"version": "4", "start": 1, "end": 2}])),
        UnreadableAnswer,
        "version spans",
    ),
    "old weights": (response(event([1, 2], version="3")), WrongVersion, "weights 3, where only 4 can be"),
    "new weights": (response(event([1, 2], version="5")), WrongVersion, "weights 5, where only 4 can be"),
    "nameless weights": (response(event([1, 2], version="default")), WrongVersion, "'default'"),
    "unknown span": (
        response(event([1, 2], weight_versions=None, weight_version="5")),
        WrongVersion,
        "before 0.5.20 do not say",
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_each_bad_answer_is_one_named_error(name: str) -> None:
    reply, kind, text = BAD_ANSWERS[name]
    began = time.monotonic()
    with pytest.raises(SglangError, match=f"(?s)http://127.0.0.1:[0-9]+ /generate: .*{text}") as caught:
        ask({"/generate": reply}, whole)
    assert type(caught.value) is kind
    assert caught.value.endpoint == "/generate" and "secret" not in str(caught.value)
    assert time.monotonic() - began < 2 * DEADLINES.answer_seconds + 2


BAD_STREAMS: dict[str, tuple[Reply, type[SglangError], str]] = {
    "garbage": (stream(b"<html>"), UnreadableAnswer, "<html>"),
    "no event": (stream() + b"hello\n", UnreadableAnswer, "expected a line of a stream"),
    "half a line": (stream() + b'data: {"output_ids"', ServerUnreachable, "before its end mark"),
    "half a stream": (stream(json.dumps(event([1], None)).encode()), ServerUnreachable, "before its end mark"),
    "no finish": (stream(json.dumps(event([1], None)).encode(), b"[DONE]"), UnreadableAnswer, "no finish reason"),
    "after its end": (
        stream(json.dumps(event([1])).encode(), json.dumps(event([1, 2])).encode(), b"[DONE]"),
        UnreadableAnswer,
        "expected the next tokens",
    ),
    "error": (stream(b'{"error": {"message": "too long", "code": 400}}', b"[DONE]"), CallRefused, "too long"),
    "full": (stream(b'{"error": {"message": "full", "code": 503}}', b"[DONE]"), QueueFull, "full"),
    "full, as an abort": (
        stream(json.dumps(event([], finish_reason={"type": "abort", "message": "full", "status_code": 503})).encode()),
        QueueFull,
        "full",
    ),
    "forgets": (
        stream(json.dumps(event([1, 2], None)).encode(), json.dumps(event([1, 3, 4])).encode(), b"[DONE]"),
        UnreadableAnswer,
        "do not continue the 2 before",
    ),
    "wrong weights": (stream(json.dumps(event([1], version="9")).encode(), b"[DONE]"), WrongVersion, "weights 9"),
    "silence": (None, ServerSilent, "no answer"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_each_bad_stream_is_one_named_error(name: str) -> None:
    reply, kind, text = BAD_STREAMS[name]
    with pytest.raises(SglangError, match=f"(?s)/generate: .*{text}") as caught:
        ask({"/generate": reply}, streamed)
    assert type(caught.value) is kind


def test_an_update_that_is_not_done_is_an_error_and_changes_no_version() -> None:
    async def update(client: SglangClient) -> int:
        with pytest.raises(CallRefused, match=r"was not done.*no such folder"):
            await client.update_from_disk("/nothing", 5)
        return client.version

    assert ask({"/update_weights_from_disk": response({"success": False, "message": "no such folder"})}, update) == 4


def test_servers_without_sessions_of_updates_need_none() -> None:
    async def announce(client: SglangClient) -> bool:
        return await client.begin_update()

    assert ask({"/begin_weight_update": response({"detail": "Not Found"}, "404 Not Found")}, announce) is False
    assert ask({"/begin_weight_update": response({"success": True, "message": ""})}, announce) is True


def test_a_server_that_is_gone_is_not_ready_and_unreachable() -> None:
    async def main() -> None:
        client = SglangClient("http://127.0.0.1:1", "", DEADLINES)
        assert not await client.is_ready()
        with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:1 /model_info"):
            await client.open(0)
        await client.close()

    asyncio.run(main())


# --- answers and versions ---------------------------------------------------------------------------------------------


def test_ids_are_of_one_length_so_that_none_is_the_beginning_of_another() -> None:
    rids = {new_rid() for _ in range(1000)}
    assert len(rids) == 1000 and {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize("shown", ["all", "new", "the last again", "new, and the last again"])
def test_parts_make_the_whole_however_events_show_tokens(shown: str) -> None:
    """The last event is an abort's. Where it waited, the last token is shown twice, whether or not it was sent."""
    tokens, reader = (7, 7, 3, 9, 9, 9), AnswerReader(RID, VersionLog(4), 4)
    logprobs = tuple((-float(i), token, None) for i, token in enumerate(tokens))
    n_sent = 6 if shown == "the last again" else 4
    parts = []
    for start, end in ((0, 1), (1, 3), (3, n_sent)):
        first = 0 if shown == "all" else start
        meta = MetaInfo(RID, None, end, weight_version="4", output_token_logprobs=logprobs[first:end])
        parts.append(reader.read(GenerateAnswer(tokens[first:end], meta)))
    first = 0 if shown == "all" else n_sent
    again = tokens[-1:] if "again" in shown else ()
    spans = (GivenSpan("4", 0, 6),)
    meta = MetaInfo(RID, FinishReason("abort"), 6, weight_versions=spans, output_token_logprobs=logprobs[first:])
    parts.append(reader.read(GenerateAnswer((*tokens[first:], *again), meta)))
    answer = parts[-1].end
    assert answer is not None and answer.tokens == tokens == tuple(token for part in parts for token in part.tokens)
    assert (
        answer.logprobs
        == tuple(-float(i) for i in range(6))
        == tuple(value for part in parts for value in part.logprobs)
    )
    assert answer.spans == (VersionSpan(4, 0, 6),)


def test_tokens_that_go_back_are_refused() -> None:
    reader = AnswerReader(RID, VersionLog(4), 4)
    first = GenerateAnswer((1, 2), MetaInfo(RID, None, 2, None, None, "4", None, ((-1.0, 1, None), (-1.0, 2, None))))
    reader.read(first)
    with pytest.raises(AnswerFault, match="do not continue"):
        reader.read(GenerateAnswer((1,), MetaInfo(RID, None, 1, None, None, "4", None, ((-1.0, 1, None),))))


def test_versions_are_those_given_since_the_request_was_sent() -> None:
    log = VersionLog(3)
    for version in (4, 6):
        log.begin(version)
        log.confirm(version)
    log.begin(9)  # on its way
    assert (log.confirmed, log.newest) == (6, 9)
    assert log.fault([VersionSpan(6, 0, 3), VersionSpan(9, 3, 5)], since=6) == ""
    assert log.fault([VersionSpan(9, 0, 3)], since=6) == ""
    assert "weights 4" in log.fault([VersionSpan(4, 0, 3)], since=6)
    assert "weights 5" in log.fault([VersionSpan(4, 0, 3), VersionSpan(5, 3, 4)], since=4)
    assert "in this order" in log.fault([VersionSpan(9, 0, 3), VersionSpan(6, 3, 4)], since=6)
    with pytest.raises(ValueError, match="number of its own"):
        log.begin(6)
    log.begin(9)  # tried again


def test_a_server_that_names_one_version_alone_is_believed_where_there_is_but_one() -> None:
    def read(log: VersionLog, since: int, version: str) -> tuple[VersionSpan, ...]:
        meta = MetaInfo(RID, FinishReason("length"), 1, None, None, version, None, ((-1.0, 5, None),))
        end = AnswerReader(RID, log, since).read(GenerateAnswer((5,), meta)).end
        assert end is not None
        return end.spans

    log = VersionLog(3)
    assert read(log, 3, "3") == (VersionSpan(3, 0, 1),)
    log.begin(4)
    with pytest.raises(VersionFault, match="weights 3 to 4 can be"):
        read(log, 3, "4")
