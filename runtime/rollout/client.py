"""The client of one SGLang server, 0.5.18 to 0.5.23. Knows no engine, no plan and no process; moves no weights itself.

Made and used in one asyncio loop, any number of calls at once. Every call has a deadline and raises SglangError.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from realgraph.runtime.rollout.answers import Answer, AnswerFault, AnswerPart, AnswerReader, VersionFault
from realgraph.runtime.rollout.connection import Connection
from realgraph.runtime.rollout.errors import (
    RETRY_STATUS,
    CallRefused,
    QueueFull,
    ServerSilent,
    ServerUnreachable,
    SglangError,
    WrongVersion,
)
from realgraph.runtime.rollout.messages import (
    BroadcastBucket,
    BroadcastGroup,
    GenerateAnswer,
    GenerateRequest,
    Loads,
    Paused,
    PauseMode,
    RankChecksums,
    RankLoad,
    ServedModel,
    ServerArguments,
    ServerChecksums,
    StreamEvent,
    Timeouts,
    Updated,
)
from realgraph.runtime.rollout.versions import VersionLog

_NOT_FOUND = 404
_PAUSED_SECONDS = 5.0  # without a refusal: the server is paused
_BEYOND = 10**12  # no vocabulary has such a token
_LAST_TOKEN = re.compile(r"logit_bias \D*\[0, (\d+)\]")
_GENERATE = "/generate"

Event = TypeVar("Event")


class SglangClient:
    """Calls to one server.

    `open` first: it says which weights the server has, and the client checks the versions of answers against those
    that it has given the server since. Two clients of one server would not know of each other's updates.
    """

    def __init__(self, url: str, key: str = "", timeouts: Timeouts | None = None) -> None:
        self._timeouts = timeouts or Timeouts()
        self._server = Connection(url, key, self._timeouts.connect_seconds)
        self._log: VersionLog | None = None

    @property
    def url(self) -> str:
        """The server's address, as errors name it."""
        return self._server.url

    @property
    def version(self) -> int:
        """The version of the weights that the server has for sure."""
        return self._versions().confirmed

    async def close(self) -> None:
        """Hang up. The server aborts what this client still waits for."""
        await self._server.close()

    async def open(self, version: int) -> ServedModel:
        """Take the weights that the server has now as `version`, and have it call them so. Nothing is aborted."""
        name = str(version)
        served = await self.model_info()
        if served.weight_version != name:
            body = {"new_version": name, "abort_all_requests": False}
            await self._update("/update_weight_version", body, self._timeouts.control_seconds)
            served = await self.model_info()
        if served.weight_version != name:
            text = f"its weights are {served.weight_version!r} after they were named {name!r}"
            raise WrongVersion(self.url, "/model_info", text, 200)
        self._log = VersionLog(version)
        return served

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Answer:
        """The whole answer. Cancelled, the server aborts the request within seconds. Raises QueueFull to try again."""
        log = self._versions()
        reader = AnswerReader(request.rid, log, log.confirmed)
        body = msgspec.structs.replace(request, stream=False)
        answer = await self._server.send(_GENERATE, body, self._timeouts.answer_seconds)
        part = self._read(reader, self._server.decode(_GENERATE, answer, GenerateAnswer), answer)
        if part.end is None:
            raise self._server.unreadable(_GENERATE, "an answer without a finish reason", answer)
        return part.end

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AnswerPart, None]:
        """The answer in parts as it grows, the last with the whole of it in `end`. Close it to abort the request."""
        log = self._versions()
        reader = AnswerReader(request.rid, log, log.confirmed)
        body = msgspec.structs.replace(request, stream=True)
        ended = False
        async with aclosing(self._server.events(_GENERATE, body, self._timeouts.answer_seconds)) as events:
            async for data in events:
                event = self._server.decode(_GENERATE, data, StreamEvent)
                if event.error is not None:
                    raise self._failed(event.error.code, data)
                if ended or event.output_ids is None or event.meta_info is None:
                    raise self._server.unreadable(_GENERATE, "expected the next tokens of a stream", data)
                part = self._read(reader, GenerateAnswer(event.output_ids, event.meta_info), data)
                ended = part.end is not None
                yield part
        if not ended:
            raise self._server.unreadable(_GENERATE, "a stream whose last part has no finish reason", b"")

    async def abort(self, rid: str) -> None:
        """End a request, which answers with the tokens that it has; nothing happens where there is none."""
        await self._abort({"rid": rid, "abort_all": False})

    async def abort_all(self) -> None:
        """End all requests, running and waiting."""
        await self._abort({"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        """Stop at the next token; requests that come now wait.

        abort: all answer with the tokens that they have. retract: their caches go, and are computed anew after
        `resume`. in_place: their caches stay, of the old weights; `flush_cache` is refused, and so is an abort's answer
        until `resume`.
        """
        await self._server.post("/pause_generation", {"mode": mode}, Paused, self._timeouts.control_seconds)

    async def resume(self) -> None:
        """Go on after `pause`; nothing happens where nothing is paused."""
        await self._server.post("/continue_generation", {}, Paused, self._timeouts.control_seconds)

    # --- weights ------------------------------------------------------------------------------------------------------

    async def update_from_disk(
        self, folder: str, version: int, *, flush_cache: bool = True, seconds: float | None = None
    ) -> None:
        """Load a Hugging Face folder that the server's host has. Where nothing is paused, requests end first. seconds:
        until it has; None: those of any update."""
        self._versions().begin(version)
        await self._load(folder, version, seconds or self._timeouts.update_seconds, flush_cache=flush_cache)
        self._versions().confirm(version)

    async def read_again(self, folder: str) -> None:
        """Load the weights that the server has from disk. It keeps its caches, which are of the same weights."""
        await self._load(folder, self.version, self._timeouts.update_seconds, flush_cache=False)

    async def init_group(self, group: BroadcastGroup) -> None:
        """Have the server's ranks join a process group, which the trainer joins meanwhile."""
        await self._update("/init_weights_update_group", group, self._timeouts.update_seconds)

    async def destroy_group(self, name: str) -> None:
        """Have the server's ranks leave a group."""
        await self._update("/destroy_weights_update_group", {"group_name": name}, self._timeouts.control_seconds)

    async def begin_update(self) -> bool:
        """Announce broadcasts, which 0.5.21 and later want. False: the server knows no such call and needs none."""
        return await self._announce("/begin_weight_update", {"selector": "all"})

    async def end_update(self) -> bool:
        """The broadcasts are over."""
        return await self._announce("/end_weight_update", {})

    async def update_from_distributed(
        self, bucket: BroadcastBucket, version: int | None, *, flush_cache: bool = True
    ) -> None:
        """Take the tensors of a bucket, which the trainer broadcasts while this call is open.

        version: of the weights that are complete with this bucket; None: more are to come, under the old version.
        """
        name = None if version is None else str(version)
        body = {**msgspec.to_builtins(bucket), "weight_version": name, "flush_cache": flush_cache}
        if version is not None:
            self._versions().begin(version)
        await self._update("/update_weights_from_distributed", body, self._timeouts.update_seconds)
        if version is not None:
            self._versions().confirm(version)

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Refused while requests run, or are paused in place."""
        await self._server.send("/flush_cache", {}, self._timeouts.control_seconds)

    async def checksums(self) -> Sequence[RankChecksums]:
        """The checksum of every tensor, rank by rank; they depend on how the server fuses and cuts tensors."""
        answer = await self._server.post(
            "/weights_checker", {"action": "checksum"}, ServerChecksums, self._timeouts.update_seconds
        )
        return answer.ranks

    # --- questions ----------------------------------------------------------------------------------------------------

    async def is_ready(self) -> bool:
        """True where it generates: not yet while it starts, and not while it is paused. Takes it a second to say."""
        try:
            await self._server.ask("/health", self._timeouts.control_seconds)
        except (ServerUnreachable, ServerSilent):
            return False
        except CallRefused as error:
            if error.status != RETRY_STATUS:
                raise
            return False
        return True

    async def model_info(self) -> ServedModel:
        """The model that is served, at once: the sign of life, for /health fails while the server is paused."""
        return await self._server.get("/model_info", ServedModel, self._timeouts.control_seconds)

    async def server_info(self) -> ServerArguments:
        """The server's version and arguments."""
        return await self._server.get("/server_info", ServerArguments, self._timeouts.control_seconds)

    async def vocabulary(self) -> int | None:
        """The size of the model's vocabulary, which a server says only where it refuses a bias of a token beyond it.
        None: it does not say, for it is paused, or has other words.

        The request is never run: it asks for two grammars at once, which is refused, too."""
        sampling = {"max_new_tokens": 1, "logit_bias": {str(_BEYOND): 0.0}, "regex": "a", "json_schema": "{}"}
        body = {"input_ids": [0], "sampling_params": sampling}
        try:
            await self._server.send(_GENERATE, body, min(_PAUSED_SECONDS, self._timeouts.control_seconds))
        except ServerSilent:
            return None
        except CallRefused as error:
            last = _LAST_TOKEN.search(error.beginning)
            return int(last[1]) + 1 if last is not None else None
        return None

    async def load(self) -> Sequence[RankLoad]:
        """Requests and cached tokens, replica by replica, as of a moment ago."""
        return (await self._server.get("/v1/loads", Loads, self._timeouts.control_seconds)).loads

    # --- parts --------------------------------------------------------------------------------------------------------

    def _versions(self) -> VersionLog:
        assert self._log is not None, "open() was not called"
        return self._log

    async def _load(self, folder: str, version: int, seconds: float, *, flush_cache: bool) -> None:
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": flush_cache}
        await self._update("/update_weights_from_disk", body, seconds)

    async def _abort(self, body: dict[str, str | bool]) -> None:
        await self._server.send("/abort_request", body, self._timeouts.control_seconds)

    async def _announce(self, endpoint: str, body: dict[str, str]) -> bool:
        try:
            await self._update(endpoint, body, self._timeouts.control_seconds)
        except CallRefused as error:
            if error.status != _NOT_FOUND:
                raise
            return False
        return True

    async def _update(self, endpoint: str, body: object, seconds: float) -> None:
        answer = await self._server.send(endpoint, body, seconds)
        if not self._server.decode(endpoint, answer, Updated).success:
            raise CallRefused(self.url, endpoint, "was not done", 200, answer)

    def _read(self, reader: AnswerReader, generated: GenerateAnswer, raw: bytes) -> AnswerPart:
        reason = generated.meta_info.finish_reason
        if reason is not None and reason.status_code is not None:  # of a stream: its own status is 200 all the same
            raise self._failed(reason.status_code, raw)
        try:
            return reader.read(generated)
        except AnswerFault as error:
            raise self._server.unreadable(_GENERATE, str(error), raw) from error
        except VersionFault as error:
            raise WrongVersion(self.url, _GENERATE, str(error), 200, raw) from error

    def _failed(self, status: int | None, data: bytes) -> SglangError:
        kind = QueueFull if status == RETRY_STATUS else CallRefused
        return kind(self.url, _GENERATE, f"the stream has failed with {status or 'an error'}", status, data)
