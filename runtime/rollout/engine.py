"""RolloutEngine over one SGLang server: a thread with an asyncio loop asks it, callers' threads wait for what it says.

The server has devices of its own. New weights come to it as a model folder: this worker's whole tensors, in shared
memory without a name, behind a link that the server opens. They are gathered while the old ones generate.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from realgraph.runtime.drawn.tokens import DrawnTokens
from realgraph.runtime.engine import (
    CacheUse,
    Completion,
    Decode,
    EngineClosed,
    EngineStatus,
    Parts,
    Request,
    WeightSpec,
)
from realgraph.runtime.files.paths import RunPath
from realgraph.runtime.generate.request_bounds import RequestBounds
from realgraph.runtime.models.train_state import read_counters
from realgraph.runtime.rollout.samples import GrowingSample
from realgraph.runtime.rollout.serving import Requests, ServedWeights, ServerHome, Serving, ServingBounds
from realgraph.runtime.rollout.weights.broadcast import Broadcast
from realgraph.runtime.rollout.weights.staged import StagedWeights, checkpoint_parts, checksums_of
from realgraph.runtime.wire.metrics import ResidentBytes

CALL_SECONDS = 1800.0  # of one call to the server by a caller; the master's deadlines are tighter

T = TypeVar("T")


class EngineModel(NamedTuple):
    """The model that a server has."""

    source: Path  # its folder
    specs: tuple[WeightSpec, ...]
    bounds: RequestBounds
    device: torch.device  # that its weights are gathered from
    decode: Decode | None = None  # for stop strings


class SglangEngine:
    """RolloutEngine. notify: called by the engine's thread whenever there is something to take. home: of the server,
    which this ends. folder: of links to weights, made and removed here.

    Raises what keeps the server from being reached.
    """

    def __init__(
        self, model: EngineModel, home: ServerHome, folder: Path, bounds: ServingBounds, notify: Callable[[], None]
    ) -> None:
        self._model, self._home, self._notify = model, home, notify
        self._staged = StagedWeights(model.source, model.specs, folder)
        self._ready: Path | None = None  # weights that `switch` takes
        self._changed = threading.Condition()
        self._requests = Requests()
        self._paused = self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._serving = self._call(self._open(bounds))

    async def _open(self, bounds: ServingBounds) -> Serving:
        serving = Serving(self._home, ServedWeights(str(self._model.source), 0), bounds, self._wake_waiting)
        try:
            await serving.open()
        except BaseException:
            self._home.close()
            raise
        watches = serving.watch(lambda: self._requests), serving.watch_cache()
        self._watches = [asyncio.create_task(watch) for watch in watches]
        return serving

    def _wake_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._notify()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do it, and wait. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine. All or none are queued."""
        self._check()
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or not self._requests.running.keys().isdisjoint(ids):
            raise ValueError("request ids in use already")
        for request in requests:
            problem = self._model.bounds.problem(request) or truncation_problem(request)
            if problem:
                raise ValueError(f"request {request.id}: {problem}")
        self._call(self._start(requests))

    async def _start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            sample = GrowingSample(request, self._model.bounds.vocabulary, self._model.decode)
            self._serving.start(sample, self._requests)

    def take(self, timeout: float) -> list[Completion]:
        """See RolloutEngine."""
        with self._changed:
            requests = self._requests
            self._changed.wait_for(lambda: requests.finished or requests.failure or self._closed, timeout)
            if not requests.finished:
                self._check()
            return [requests.finished.popleft() for _ in range(len(requests.finished))]

    def drawn(self, since: Mapping[int, int]) -> Sequence[DrawnTokens]:
        """See RolloutEngine. Of servers that do not stream, what came back from them before an update."""
        return self._call(self._drawn(since))

    async def _drawn(self, since: Mapping[int, int]) -> Sequence[DrawnTokens]:
        return self._serving.drawn(self._requests, since)

    def abort(self, ids: Sequence[int]) -> None:
        """See RolloutEngine."""
        self._call(self._serving.abort(self._requests, list(ids)))
        gone = set(ids)
        finished = self._requests.finished
        for _ in range(len(finished)):
            if (done := finished.popleft()).id not in gone:
                finished.append(done)

    def pause(self) -> None:
        """See RolloutEngine."""
        self._call(self._serving.pause())
        self._paused = True

    def resume(self) -> None:
        """See RolloutEngine."""
        self._call(self._serving.resume())
        self._paused = False

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """See RolloutEngine. What is set aside goes on beside what comes meanwhile."""
        kept, paused = self._requests, self._paused
        self._requests = Requests()
        if paused:
            self.resume()
        try:
            yield
        finally:
            if not self._closed:
                self._call(self._serving.abort(self._requests, list(self._requests.running)))
                if paused:
                    self.pause()
            self._requests = kept
            if kept.finished or kept.failure:
                self._notify()

    def follow(self) -> None:
        """See RolloutEngine. Nobody generates with this worker."""

    def dismiss(self) -> None:
        """See RolloutEngine. Nobody generates with this worker."""

    # --- weights ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._serving.weights.version

    @property
    def source(self) -> Path | None:
        """The folder that the model came from."""
        return self._model.source

    @property
    def device(self) -> torch.device:
        """The device that weights are gathered from."""
        return self._model.device

    def weight_specs(self) -> Sequence[WeightSpec]:
        """See RolloutEngine."""
        return self._model.specs

    def resident_bytes(self) -> ResidentBytes:
        """See RolloutEngine. On all devices of the server."""
        return ResidentBytes(sum(entry.nbytes for entry in self._staged.entries))

    def prepare(self, parts: Parts) -> None:
        """See RolloutEngine. The old weights stay whole: generation goes on."""
        self._ready = self._staged.gather(parts)

    def switch(self, version: int, cache: CacheUse = "recompute") -> None:
        """See RolloutEngine. Caches are always computed again: SGLang would share old ones with later samples."""
        assert cache == "recompute", "a run file with other caches is refused"
        assert self._ready is not None, "weights are prepared before they are switched to"
        self._call(self._serving.update(ServedWeights(str(self._ready), version), "retract"))
        self._staged.keep(self._ready)
        self._ready = None

    def receive(self, folder: Path, version: int, broadcast: Broadcast) -> None:
        """Generate under weights that are broadcast, and lie in a folder, too, until the update after the next."""
        self._call(self._serving.update(ServedWeights(str(folder), version), "retract", broadcast))
        self._staged.keep(folder)

    def checksums(self) -> Tensor:
        """See RolloutEngine. Those of what the server was given."""
        return checksums_of(Path(self._serving.weights.folder), self._model.specs)

    def server_checksums(self) -> Mapping[str, str] | None:
        """Those of what the server holds, tensor by tensor as it has fused and cut them; None where it tells none."""
        return self._call(self._serving.checksums())

    def read_again(self) -> None:
        """Have the server read the weights that it has from their folder."""
        self._call(self._serving.read_again())

    @property
    def quantized(self) -> bool:
        """The server holds weights as fewer bits than it is given."""
        return self._serving.quantized

    @property
    def url(self) -> str:
        """The server's address."""
        return self._serving.client.url

    def release(self, *, weights: bool) -> None:
        """See RolloutEngine. The server's memory is on devices that no other call has."""
        assert not weights, "the copy of a server is not given up"

    def load(self, folder: RunPath) -> None:
        """See RolloutEngine."""
        self.prepare(checkpoint_parts(folder, self._model.specs))
        self.switch(read_counters(folder).version)

    # --- state --------------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """See RolloutEngine."""
        requests, sent = self._requests, self._serving.sent
        drawn = [sample.n_tokens for sample in list(requests.running.values()) if sample.rid]
        load = sent, max(0, len(requests.running) - sent), self.version, self._serving.free_cache_tokens
        return EngineStatus(*load, failure=requests.failure, drawn_tokens=sum(drawn), address=self.url)

    def close(self, timeout: float) -> bool:
        """See RolloutEngine. Ends a server that was started for it."""
        if self._closed:
            return not self._thread.is_alive()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._call(self._end())
        self._home.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        self._staged.remove()
        return not self._thread.is_alive()

    async def _end(self) -> None:
        tasks = [*self._watches, *self._requests.tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._serving.close()

    def _check(self) -> None:
        """Raises what has ended generation."""
        if self._requests.failure is not None:
            raise self._requests.failure
        if self._closed:
            raise EngineClosed


def truncation_problem(request: Request) -> str:
    """Reason why the log-probabilities of a request would be wrong, '' where they are not."""
    if request.temperature > 0 and (request.top_p < 1 or request.top_k):
        return "SGLang gives log-probabilities without top_p and top_k, which would not be those it was drawn with"
    return ""
