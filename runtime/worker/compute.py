"""The compute thread of a worker: model work in the order of its commands, and what generation has finished. Worker
side.

Generation runs beside it in the rollout engine's own time; calls that need the device pause it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Function, Generate, Train
from realgraph.planner.plan.plan import reallocation_node
from realgraph.runtime.data.stops import stops_of
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Rollouts, Sampling, StaleWeightsError, Texts
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.wire.protocol import (
    PEAK_BYTES,
    PREFETCHED_BYTES,
    Abort,
    Configure,
    Done,
    EndSession,
    Evaluate,
    Execute,
    Generated,
    Load,
    Loaded,
    Max,
    Metric,
    Ready,
    Reallocate,
    Reply,
    Rescue,
    Save,
    Submit,
)
from realgraph.runtime.worker.evaluation import Evaluation
from realgraph.runtime.worker.failures import failure
from realgraph.runtime.worker.function_calls import FunctionCalls, PromptTexts
from realgraph.runtime.worker.loading import Loading
from realgraph.runtime.worker.model_calls import ModelCalls
from realgraph.runtime.worker.resources import ABANDONED_SECONDS, Resources
from realgraph.runtime.worker.roles import Roles
from realgraph.runtime.worker.samples import SamplesFile, keeps_samples, open_lines
from realgraph.runtime.worker.update_gate import UpdateGate

log = logging.getLogger(__name__)

ModelCommand = Load | Submit | Execute | Reallocate | Save | Evaluate | Abort | EndSession
AloneCommand = Execute | Reallocate | Save | Evaluate  # has the device to itself
CLOSE_SECONDS = 2.0


class Collect(msgspec.Struct, frozen=True):
    """A rollout engine has something to take."""


class Compute:
    """Everything that runs models on one worker. `open` and `rescue` are called from threads of the control loop."""

    def __init__(self, resources: Resources, configure: Configure, post: Callable[[Reply], None]) -> None:
        self.job = msgspec.json.decode(configure.job, type=Job)
        self.worker = resources.worker
        self._resources, self._configure, self._post = resources, configure, post
        self._work: queue.SimpleQueue[ModelCommand | Collect | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._samples: SamplesFile | None = None
        self._host: FunctionHost | None = None

    # --- called by the control loop -----------------------------------------------------------------------------------

    def open(self) -> Ready:
        """Join the groups, load data and models, start the thread. Raises what went wrong."""
        began = time.monotonic()
        job, graph = self.job, self.job.graph
        resources = self._resources
        resources.connect(self._configure.peers)
        collectives = resources.join(job, self._configure.collective)
        self._loading = Loading(job)
        self._assembler = Assembler(graph, resources.store, resources.plane, ABANDONED_SECONDS)
        self.roles = Roles(job, self.worker, collectives, self._loading.decode, lambda: self._work.put(Collect()))
        host = self._host = FunctionHost(
            job.user_dir, job.function_processes(self.worker), max_processes=job.runtime.function_max_processes
        )
        self.functions = FunctionCalls(
            job, self._assembler, host, self.worker, PromptTexts(self._loading.decode, self._prompt)
        )
        for name, call in graph.calls.items():
            if isinstance(call, Function):
                host.check(name, call)
        self._calls = ModelCalls(job, self._assembler, self.roles, self.worker)
        if self._configure.resume:
            self.roles.load(resources.run_path(self._configure.resume))
        self._rollouts = self._make_rollouts(graph)
        self._gate = UpdateGate(job, self.roles, self._rollouts, self.worker)
        self._evaluation = Evaluation(job, self._loading, self._rollouts, host, self.worker)
        if keeps_samples(graph) and job.steps > 0:
            file = RunFolder(Path(job.run_dir)).samples / f"worker-{self.worker}.jsonl"
            lines = open_lines(resources.run_path(str(file)))
            self._samples = SamplesFile(graph, resources.store, self._loading.decode, lines)
        self._thread.start()
        return Ready(
            worker=self.worker,
            n_rows=self._loading.n_rows,
            n_eval_rows=self._loading.n_eval_rows,
            facts={
                "load_seconds": time.monotonic() - began,
                **{f"parameters/{role}": float(n) for role, n in self.roles.n_parameters().items()},
            },
        )

    def _make_rollouts(self, graph: Graph) -> Rollouts | None:
        for name, engine in self.roles.rollouts.items():
            if not self.roles.leads(name):
                continue
            call = graph.calls[name]
            assert isinstance(call, Generate)
            stops = stops_of(name, call, self.job.data, self._loading.tokenizer, engine.source)
            sampling = Sampling.of(call, self.job.batch.max_new_tokens, stops)
            mask_unfinished = self.job.data.truncated == "mask"
            texts = Texts(self._loading.decode, self._loading.own_tokens)
            return Rollouts(name, engine, sampling, call.reads[0], self._assembler, texts, mask_unfinished)
        return None

    def _prompt(self, group: int) -> str:
        """The text of a group's prompt, where this worker generated it."""
        key = self._rollouts.prompt_key if self._rollouts is not None else ""
        held = self._resources.store.has(key, group)
        return self._loading.decode(self._resources.store.get(key, group).tolist()) if held else ""

    def queue(self, work: ModelCommand) -> None:
        """Hand over a command; the thread takes them in order."""
        self._work.put(work)

    def drop(self, groups: Sequence[int]) -> None:
        """Forget what the store holds of these groups; where they are what the run is for, write them down first."""
        if self._samples is not None:
            try:
                self._samples.write(groups)
            except OSError as error:
                self._post(failure(self.worker, "samples", error))
        n = self.job.graph.samples_per_group
        gone = set(groups)
        keys = self.job.graph.keys
        by_group = [name for name, key in keys.items() if key.type.level == "group"]
        by_sample = [name for name, key in keys.items() if key.type.level != "group"]
        self._resources.store.drop(by_group, gone)
        self._resources.store.drop(by_sample, [group * n + index for group in gone for index in range(n)])

    def rescue(self, command: Rescue) -> None:
        """Write this worker's share of the trained states. Raises OSError."""
        self.roles.rescue(self._resources.run_path(command.folder), command.versions, command.writers)

    def device_bytes(self) -> int:
        """The most memory that tensors have taken on the GPU; 0 on a CPU."""
        return self._resources.memory.most() if self._resources.device.type == "cuda" else 0

    def close(self) -> bool:
        """End both threads and the functions' subprocesses. False where a thread is stuck in a call."""
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        generating = [engine for engine in self.roles.rollouts.values() if not engine.close(CLOSE_SECONDS)]
        if self._host is not None:
            self._host.close()
        if self._samples is not None:
            self._samples.close()
        return not self._thread.is_alive() and not generating

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Commands, and what generation has finished, in the order in which they come."""
        while (work := self._work.get()) is not None:
            try:
                reply = self._run(work)
            except Exception as error:
                name = self._name(work)
                log.exception("%s failed", name)
                self._post(failure(self.worker, name, error))
            else:
                if reply is not None:
                    self._post(reply)

    def _name(self, work: ModelCommand | Collect) -> str:
        match work:
            case Collect():
                return self._rollouts.name if self._rollouts is not None else ""
            case Execute(call=call) | Submit(call=call) | Reallocate(call=call) | EndSession(call=call):
                return call
            case _:
                return type(work).__name__.lower()

    @contextmanager
    def _device(self, *, memory: bool) -> Iterator[None]:
        """The device for one call: generation pauses. memory: also that of its caches, where the plan needs it."""
        engines = self.roles.rollouts.values()
        for engine in engines:
            engine.pause()
            if memory and self.job.gives_up_caches:
                engine.release(weights=False)
        try:
            yield
        finally:
            for engine in engines:
                engine.resume()

    def _run(self, work: ModelCommand | Collect) -> Reply | None:
        match work:
            case Collect():
                return self._collect()
            case Load(groups=groups):
                return self._load(groups)
            case Submit():
                return self._submit(work)
            case Abort(groups=groups):
                if self._rollouts is not None:
                    self._rollouts.abort(groups)
                return None
            case EndSession(call=call):
                self.roles.release(call)
                return None
            case _:
                with self._device(memory=isinstance(work, Execute | Reallocate)):
                    return self._counted(work)

    def _counted(self, work: AloneCommand) -> Done:
        """Run a command that has the device, with the most bytes there were meanwhile where it is of a model."""
        memory = self._resources.memory
        memory.begin()
        done = self._run_alone(work)
        peak = memory.peak()
        memory.begin()  # what generates next is counted by itself
        planned = isinstance(work, Execute) and done.call in self.job.plan.allocations
        if not planned or peak is None:
            return done
        return msgspec.structs.replace(done, metrics={**done.metrics, PEAK_BYTES: Max(float(peak))})

    def _collect(self) -> Generated | None:
        """Groups that generation has finished; on workers that only follow a head, there is nothing but its failure."""
        if self._rollouts is not None:
            made = self._rollouts.collect(self.worker)
            if made is None or (peak := self._resources.memory.peak()) is None:
                return made
            return msgspec.structs.replace(made, metrics={**made.metrics, PEAK_BYTES: Max(float(peak))})
        for engine in self.roles.rollouts.values():
            engine.take(0.0)
        return None

    def _run_alone(self, work: AloneCommand) -> Done:
        match work:
            case Execute(call=call):
                with self.roles.prefetching(call) as early:
                    done = self._execute(work)
                came = {PREFETCHED_BYTES: Max(float(early))} if early else {}
                return msgspec.structs.replace(done, metrics={**done.metrics, **came}, ended=time.time())
            case Reallocate():
                return self._reallocate(work)
            case Save():
                self.roles.end_prefetches()
                return self._timed(work.task, "save", lambda: self.roles.save(self._resources.run_path(work.folder)))
            case Evaluate():
                self.roles.end_prefetches()
                return self._evaluation.run(work)

    def _timed(self, task: int, call: str, run: Callable[[], Mapping[str, Metric] | None]) -> Done:
        began = time.time()
        metrics = run() or {}
        return Done(self.worker, task, call, metrics, started=began, ended=time.time())

    def _execute(self, work: Execute) -> Done:
        done, call = self._calls.run(work), self.job.graph.calls[work.call]
        if not isinstance(call, Train):
            return done
        gap = self._gate.after_training(call.model)
        return msgspec.structs.replace(done, metrics={**done.metrics, **gap}, ended=time.time())

    def _reallocate(self, work: Reallocate) -> Done:
        began = time.time()
        arrived = self.roles.reallocate(work.role, work.call, work.version, work.owners)
        metrics = self._gate.after_reallocation(work.call, work.owners)
        name, held = reallocation_node(work.call), self.roles.held_bytes(work.call)
        ended = time.time()
        return Done(self.worker, work.task, name, metrics, started=began, ended=ended, arrived=arrived, held=held)

    def _load(self, groups: Sequence[int]) -> Loaded:
        samples, skipped = self._loading.load_samples(groups, self._assembler)
        return Loaded(self.worker, tuple(g for g in groups if g not in skipped), samples, skipped)

    def _submit(self, work: Submit) -> Generated | None:
        assert self._rollouts is not None
        if self._rollouts.engine.version < work.version:
            raise StaleWeightsError(repr(work.call), work.version, self._rollouts.engine.version)
        prompts, skipped, asked = self._loading.load_prompts(work.groups, self._assembler, self._rollouts.prompt_key)
        self._rollouts.submit(prompts, self.job.seed, asked)
        if not skipped:
            return None
        return Generated(self.worker, self._rollouts.name, (), (), skipped=skipped)
