"""The stand-in's endpoints, and its start (`tests.sglang_forks`).

`SGLANG_STANDIN_RELEASE` is the release that it behaves as (0.5.23). `SGLANG_STANDIN_FAULT` names a file; while it holds
one of these words, /generate does that: `garbage`, `500`, `nothing`, `half` (of a stream, or of an answer),
`version` (tokens carry one that nobody gave), `die`. `broadcast` ends the first server that is to take one.
`no_loads`: it knows no /v1/loads. `no_update` and `no_pause`: updates from disk, or pauses, never end. Of weights that
come from disk, `stale` takes none, and `twisted` takes one number wrong; `unchecked` knows no checksums.
"""

import argparse
import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.spec import ModelRole
from realgraph.runtime.data.tokenize import VOCABULARIES, load_tokenizer
from realgraph.runtime.engine import RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.building import Start, build
from realgraph.runtime.models.weights import read_into
from tests.sglang_standin.generation import QUEUED, Generation, Live, model_folder, release_of
from tests.sglang_standin.groups import Broadcasts
from tests.sglang_standin.http import Answer, Call, of_json, refused, serve_connection

OLD_NAMES = {"/get_model_info": "/model_info", "/get_server_info": "/server_info", "/health_generate": "/health"}
OPEN = ("/health", "/ready")  # without a key
POLL_SECONDS = 0.2


def letters(tokens: Sequence[int]) -> str:
    """Text of tokens where a model has no tokenizer, of one letter each."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


class Server:
    """One server. arguments: of the command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.release = arguments, release_of(os.environ.get("SGLANG_STANDIN_RELEASE", "0.5.23"))
        self.model_path = arguments.model_path
        folder = model_folder(arguments.model_path)
        role = ModelRole(dtype=arguments.dtype)
        self.model = build(role, str(folder), Start(torch.device("cpu"))).requires_grad_(False)
        has_words = any((folder / name).is_file() for name in VOCABULARIES)
        words = load_tokenizer(str(folder)) if has_words else None
        self._decode = (lambda ids: words.decode(list(ids))) if words is not None else letters
        limits = RolloutLimits(max_running=arguments.max_running_requests, max_length=arguments.context_length)
        batch = ContinuousBatch(self.model.network, limits, decode=self._decode)
        most = arguments.context_length or self.model.config.max_position_embeddings
        self.generation = Generation(batch, self._decode, self.release, (most, arguments.max_queued_requests))
        self.generation.versions = [arguments.weight_version]
        self.broadcasts = Broadcasts(self.model.network)
        self._seeds = random.Random(arguments.random_seed)
        self._session = False  # between begin_weight_update and end_weight_update
        self._go = asyncio.Event()
        self._go.set()
        self._endpoints: dict[str, Callable[[Call], Awaitable[Answer]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._from_disk,
            "/update_weight_version": self._rename,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/weights_checker": self._checksums,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._nothing,
            "/health": self._health,
            "/ready": self._ready,
            "/v1/loads": self._loads,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }
        if self.release >= (0, 5, 21):
            self._endpoints |= {"/begin_weight_update": self._begin, "/end_weight_update": self._finish}

    async def handle(self, call: Call) -> Answer:
        """Any request. What no endpoint expects ends the server, as an error in SGLang's scheduler does."""
        endpoint = self._endpoints.get(OLD_NAMES.get(call.path, call.path))
        if endpoint is None:
            return of_json({"detail": "Not Found"}, 404)
        if self.arguments.api_key and call.key != self.arguments.api_key and call.path not in OPEN:
            return of_json({"error": "Unauthorized"}, 401)
        return await endpoint(call)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def _generate(self, call: Call) -> Answer:
        fault = self._fault() if "logit_bias" not in call.body.get("sampling_params", {}) else ""  # of no question
        if fault == "die":
            os._exit(1)
        if fault == "nothing":
            await asyncio.sleep(3600)
        if fault == "500":
            return Answer(500, b"Internal Server Error")
        if fault == "garbage":
            return Answer(200, b"<html>no such thing</html>")
        await self._go.wait()
        async with self.generation.updating:  # new requests wait for an update that is under way
            body = call.body
            rid = body.get("rid") or f"{self._seeds.getrandbits(128):032x}"
            try:
                sampling = body.get("sampling_params", {})
                live = self.generation.submit(rid, body["input_ids"], sampling, self._seeds.getrandbits(40))
            except ValueError as error:
                return refused(str(error))
            except OverflowError as error:
                return refused(str(error), 503)
        watch = asyncio.create_task(self._watch(live, call))
        if body.get("stream"):
            return Answer(events=self._stream(live, fault), cut=1 if fault == "half" else None)
        meta = await live.done
        watch.cancel()
        if "refused" in meta:
            return refused(meta["refused"], 503)
        answer = of_json(self._answer(meta, fault))
        return Answer(200, answer.body, headers=answer.headers, cut=40 if fault == "half" else None)

    def _answer(self, meta: dict[str, Any], fault: str) -> dict[str, Any]:
        tokens, reason = meta.pop("output_ids"), meta["finish_reason"] or {}
        if fault == "version":
            meta |= {"weight_version": "777"}
            meta |= {"weight_versions": [{"version": "777", "start": 0, "end": meta["completion_tokens"]}]}
        answer = {"text": self._decode(tokens), "output_ids": tokens, "meta_info": meta}
        if self.arguments.skip_tokenizer_init and reason.get("message") != QUEUED:
            del answer["text"]
        return answer

    async def _stream(self, live: Live, fault: str) -> AsyncIterator[Any]:
        """All tokens so far, or the new ones alone; the spans come with the last."""
        sent, cut = 0, self.arguments.incremental_streaming_output
        textless = cut and self.arguments.skip_tokenizer_init

        def event(meta: dict[str, Any], first: int, fault: str = "") -> dict[str, Any]:
            if cut:
                meta |= {name: meta[name][first:] for name in ("output_ids", "output_token_logprobs")}
            return self._answer(meta, fault)

        while not live.done.done():
            await live.steps.wait()
            live.steps.clear()
            if live.done.done():
                break
            made = self.generation.snapshot(live)
            if textless:
                made = made[0][:-1], made[1][:-1], made[2][:-1]  # the newest is on its way
            if len(made[0]) > sent:
                meta = self.generation._meta(live, made, queued=False)
                meta.pop("weight_versions", None)
                yield event({**meta, "finish_reason": None}, sent)
                sent = len(made[0])
        end = live.done.result()
        if "refused" in end:
            yield {"error": {"message": end["refused"], "code": 503}}
            yield "[DONE]"
            return
        waits, queued = len(end["output_ids"]) > sent, end["finish_reason"].get("message") == QUEUED
        if textless and waits and queued:
            raise KeyError("text")  # it joins the texts of parts that wait to be sent, where the last alone has one
        yield event(end, sent, fault)
        yield "[DONE]"

    async def _watch(self, live: Live, call: Call) -> None:
        """A client that closes its connection aborts its request."""
        while not live.done.done():
            if call.gone():
                self.generation.abort(live.rid)
            await asyncio.sleep(POLL_SECONDS)

    @staticmethod
    def _fault() -> str:
        file = os.environ.get("SGLANG_STANDIN_FAULT", "")
        return Path(file).read_text().strip() if file and Path(file).exists() else ""

    async def _abort(self, call: Call) -> Answer:
        everything, rid = call.body.get("abort_all", False), call.body.get("rid", "")
        known = everything or any(live.rid == rid for live in self.generation.live.values())
        if known:  # the front end drops ids that it does not know; the scheduler goes by prefix
            self.generation.abort(None if everything else rid)
        return Answer()

    async def _pause(self, call: Call) -> Answer:
        if self._fault() == "no_pause":
            await asyncio.sleep(3600)
        self._go.clear()
        await self.generation.pause(call.body.get("mode", "abort"))
        return of_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, call: Call) -> Answer:
        self.generation.paused = None
        self._go.set()
        return of_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, call: Call) -> Answer:
        if self.generation.flush():
            return Answer(body=b"Cache flushed.\n")
        return Answer(400, b"Flush cache failed.\n")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _from_disk(self, call: Call) -> Answer:
        if self._fault() == "no_update":
            await asyncio.sleep(3600)
        async with self.generation.updating:
            await self.generation.when_idle()
            try:
                if self._fault() != "stale":
                    read_into(self.model.network, model_folder(call.body["model_path"]), "lm")
                if self._fault() == "twisted":
                    next(self.model.network.parameters()).view(-1)[-1:] += 1.0
            except (ConfigError, OSError, SafetensorError) as error:
                return of_json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
            self.model_path = call.body["model_path"]
            return self._updated(call)

    def _updated(self, call: Call) -> Answer:
        if call.body.get("abort_all_requests"):
            self.generation.abort(None)
        flush = call.body.get("flush_cache", True)
        wrong = self.generation.weights_changed(call.body.get("weight_version"), flush=flush)
        said = {"success": not wrong, "message": wrong or "Succeeded to update model weights."}
        return of_json({**said, "num_paused_requests": 0}, 400 if wrong else 200)

    async def _from_distributed(self, call: Call) -> Answer:
        if self.release >= (0, 5, 21) and not self._session:
            text = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            return of_json({"success": False, "message": text}, 400)
        if self._fault() == "broadcast":
            Path(os.environ["SGLANG_STANDIN_FAULT"]).unlink()
            os._exit(1)
        async with self.generation.updating:
            await self.generation.when_idle()
            try:
                await asyncio.to_thread(self.broadcasts.receive, call.body)
            except (KeyError, ValueError) as error:
                return of_json({"success": False, "message": str(error)}, 400)
            return self._updated(call)

    async def _join(self, call: Call) -> Answer:
        try:
            await asyncio.to_thread(self.broadcasts.join, call.body)
        except (dist.DistError, RuntimeError) as error:
            return of_json({"success": False, "message": str(error)}, 400)
        return of_json({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _leave(self, call: Call) -> Answer:
        known = self.broadcasts.leave(call.body.get("group_name", "weight_update_group"))
        return of_json({"success": known, "message": ""}, 200 if known else 400)

    async def _begin(self, call: Call) -> Answer:
        self._session = True
        return of_json({"success": True, "message": ""})

    async def _finish(self, call: Call) -> Answer:
        self._session = False
        return of_json({"success": True, "message": ""})

    async def _rename(self, call: Call) -> Answer:
        if call.body.get("abort_all_requests", True):
            self.generation.abort(None)
        self.generation.rename(call.body["new_version"])
        return of_json({"success": True, "message": "", "new_version": call.body["new_version"]})

    async def _checksums(self, call: Call) -> Answer:
        if self._fault() == "unchecked":
            return of_json({"detail": "Not Found"}, 404)
        raw = {n: p.detach().contiguous().view(torch.uint8) for n, p in self.model.network.named_parameters()}
        sums = {name: hashlib.sha256(values.numpy().tobytes()).hexdigest() for name, values in raw.items()}
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
        rank = {"checksums": sums, "per_gpu_checksum": whole}
        return of_json({"success": True, "message": "", "ranks": [rank], "per_engine_checksum": whole})

    async def _release(self, call: Call) -> Answer:
        if self.generation.live:
            os._exit(1)  # AssertionError: release_memory_occupation should be called only when no ongoing request
        return of_json(None)

    async def _nothing(self, call: Call) -> Answer:
        return of_json(None)

    # --- facts --------------------------------------------------------------------------------------------------------

    async def _health(self, call: Call) -> Answer:
        """It generates a token, which a pause holds back."""
        for _ in range(int(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))):
            await asyncio.sleep(1.0)
            if self.generation.paused is None:
                return Answer()
        return Answer(503)

    async def _ready(self, call: Call) -> Answer:
        if self.release < (0, 5, 20):
            return of_json({"detail": "Not Found"}, 404)
        return Answer(200 if self.generation.paused is None else 503)

    async def _loads(self, call: Call) -> Answer:
        if self._fault() == "no_loads":
            return of_json({"detail": "Not Found"}, 404)
        batch = self.generation.batch
        counts = {
            "num_running_reqs": batch.running,
            "num_waiting_reqs": batch.waiting,
            "num_used_tokens": self.generation.used_tokens,
        }
        return of_json({"loads": [{**counts, "max_total_num_tokens": 1 << 20}]})

    async def _model_info(self, call: Call) -> Answer:
        config = self.model.config
        return of_json(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.arguments.model_path,
                "is_generation": True,
                "weight_version": self.generation.version,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def _server_info(self, call: Call) -> Answer:
        given = {name: value for name, value in vars(self.arguments).items() if name != "api_key"}
        facts = {"version": ".".join(map(str, self.release)), "dp_size": 1, "pp_size": 1}
        sizes = {"max_total_num_tokens": 1 << 20, "max_req_input_len": self.generation.most_tokens - 6}
        return of_json({**given, **facts, **sizes, "internal_states": [{}]})


async def serve(arguments: argparse.Namespace) -> None:
    """Until the process is ended."""
    server = Server(arguments)
    listening = await asyncio.start_server(
        lambda reader, writer: serve_connection(reader, writer, server.handle), arguments.host, arguments.port
    )
    print("The server is fired up and ready to roll!", flush=True)
    async with listening:
        await server.generation.serve()


def start(arguments: argparse.Namespace) -> None:
    """Run a server until the process is ended."""
    torch.set_num_threads(1)
    asyncio.run(serve(arguments))
