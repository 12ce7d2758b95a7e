"""The compute thread of a worker: model work in the order of its commands, and what generation has finished.

Generation runs beside it in the rollout engine's own time; calls that need the device pause it. Worker side.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from realgraph.graphs.spec import Function, Generate, Train
from realgraph.planner.plan.plan import reallocation_node
from realgraph.planner.request.engine_support import run_support
from realgraph.runtime.data.stops import stops_of
from realgraph.runtime.drawn.sharing import TokenSharing
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Peers, Rollouts, Sampling, StaleWeightsError, Texts, Writes
from realgraph.runtime.job.engine_loss import shares_tokens
from realgraph.runtime.job.job import Job
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.runtime.job.sample_ids import call_seed
from realgraph.runtime.job.samples import keeps_samples
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.store.inputs import Inputs
from realgraph.runtime.wire.metrics import PEAK_BYTES, PREFETCHED_BYTES, Max, Metric, merge
from realgraph.runtime.wire.protocol import (
    Abort,
    Configure,
    Done,
    EndSession,
    Evaluate,
    Execute,
    Forget,
    Generated,
    Keep,
    Load,
    Loaded,
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
from realgraph.runtime.worker.loading import LaterPrompts, Loading
from realgraph.runtime.worker.model_calls import ModelCalls, rank_share
from realgraph.runtime.worker.resources import ABANDONED_SECONDS, Resources
from realgraph.runtime.worker.roles import Roles
from realgraph.runtime.worker.samples import Lines, SamplesFile, open_lines
from realgraph.runtime.worker.update_gate import UpdateGate

log = logging.getLogger(__name__)

ModelCommand = Load | Submit | Execute | Reallocate | Save | Evaluate | Abort | EndSession | Keep | Forget
AloneCommand = Execute | Reallocate | Save | Evaluate  # has the device to itself
CLOSE_SECONDS = 2.0
UPDATE_SECONDS = "update_seconds"  # metric of a train call: it stood still for engines that take up the last weights


class Collect(msgspec.Struct, frozen=True):
    """The rollout engine of a generate call has something to take."""

    call: str


class SendDrawn(msgspec.Struct, frozen=True):
    """Other engines are to be told what was drawn."""


class Compute:
    """Everything that runs models on one worker. `open` and `rescue` are called from threads of the control loop."""

    def __init__(self, resources: Resources, configure: Configure, post: Callable[[Reply], None]) -> None:
        self.job = msgspec.json.decode(configure.job, type=Job)
        self.worker = resources.worker
        self._resources, self._configure, self._post = resources, configure, post
        self._work: queue.SimpleQueue[ModelCommand | Collect | SendDrawn | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._samples: SamplesFile | None = None
        self._audit: Lines | None = None
        self._host: FunctionHost | None = None

    # --- called by the control loop -----------------------------------------------------------------------------------

    def open(self) -> Ready:
        """Join the groups, load data and models, start the thread. Raises what went wrong."""
        began = time.monotonic()
        job, graph = self.job, self.job.graph
        resources = self._resources
        resources.connect(self._configure.peers)
        collectives = resources.join(job, self._configure.collective, self._configure.engine)
        self._loading = Loading(job)
        self._assembler = Assembler(graph, resources.store, resources.plane, ABANDONED_SECONDS)
        self.inputs = Inputs(self._assembler, rank_share(job.plan.allocations, self.worker))
        self.roles = Roles(
            job, resources.handover, collectives, self._loading.decode, lambda call: self._work.put(Collect(call))
        )
        host = self._host = FunctionHost(
            job.user_dir, job.function_processes(self.worker), max_processes=job.runtime.function_max_processes
        )
        texts = PromptTexts(self._loading.decode, self._loading.prompt_text)
        self.functions = FunctionCalls(job, self._assembler, self.inputs, host, self.worker, texts)
        for name, call in graph.calls.items():
            if isinstance(call, Function):
                host.check(name, call)
        self._audit = self._lines(RunFolder(Path(job.run_dir)).audit) if job.outputs.audit else None
        self._calls = ModelCalls(job, self._assembler, self.inputs, self.roles, self.worker, self._audit)
        self._later = LaterPrompts(job, self._assembler, self._loading)
        if self._configure.resume:
            self.roles.load(resources.run_path(self._configure.resume))
        self._sharing = TokenSharing(
            self.worker, resources.kept, resources.deposit, lambda: self._work.put(SendDrawn())
        )
        self._rollouts = {name: self._make_rollouts(name) for name in self.roles.rollouts if self.roles.leads(name)}
        if self._first is not None and self.functions.begins_early:
            self._first.ended = self.functions.begin
        self._gates = [UpdateGate(job, self.roles, self._rollouts, self.worker, name) for name in graph.generates]
        self._evaluation = Evaluation(job, self._loading, self._rollouts, self._later, self._assembler, host, resources)
        if keeps_samples(graph) and job.steps > 0 and not job.rollout_alone:
            lines = self._lines(RunFolder(Path(job.run_dir)).samples)
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

    def _lines(self, folder: Path) -> Lines:
        """This worker's file of lines in a folder of the run."""
        return open_lines(self._resources.run_path(str(folder / f"worker-{self.worker}.jsonl")))

    def _make_rollouts(self, name: str) -> Rollouts:
        """The rollouts of a generate call that this worker leads."""
        graph, engine = self.job.graph, self.roles.rollouts[name]
        call = graph.calls[name]
        assert isinstance(call, Generate)
        stops = stops_of(name, call, self.job.data, self._loading.tokenizer, engine.source)
        sampling = Sampling.of(call, self.job.batch.max_new_tokens, stops)
        mask_unfinished = self.job.data.truncated == "mask"
        texts = Texts(self._loading.decode, self._loading.own_tokens if name == graph.generates[0] else {})
        writes = Writes.of(graph, name)
        shares = shares_tokens(self.job.graph, self.job.plan)
        peers = Peers(self._sharing, self.job.rollout.interrupt == "wait") if shares else None
        return Rollouts(name, engine, sampling, call.reads[0], self._assembler, texts, writes, mask_unfinished, peers)

    @property
    def _first(self) -> Rollouts | None:
        """The rollouts that make the samples of groups, where this worker leads some."""
        return self._rollouts.get(next(iter(self.job.graph.generates), ""))

    def queue(self, work: ModelCommand) -> None:
        """Hand over a command; the thread takes them in order."""
        if isinstance(work, Execute):
            self.inputs.begin(work)
        self._work.put(work)

    def drop(self, groups: Sequence[int]) -> None:
        """Forget what the store holds of these groups; where they are what the run is for, write them down first."""
        if self._samples is not None:
            try:
                self._samples.write(groups)
            except OSError as error:
                self._post(failure(self.worker, "samples", error))
        self._forget(groups)
        for rollouts in self._rollouts.values():
            rollouts.over(groups)

    def _forget(self, groups: Sequence[int]) -> None:
        self._assembler.drop(groups)
        self.functions.forget(groups)

    def rescue(self, command: Rescue) -> None:
        """Write this worker's share of the trained states. Raises OSError."""
        self.roles.rescue(self._resources.run_path(command.folder), command.versions, command.writers)

    def device_bytes(self) -> int:
        """The most memory that tensors have taken on the GPU; 0 on a CPU."""
        return self._resources.memory.most() if self._resources.device.type == "cuda" else 0

    def close(self) -> bool:
        """End both threads and the functions' subprocesses. False where a thread is stuck in a call."""
        self._work.put(None)
        self._sharing.close(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        self.inputs.close()
        ended = self.roles.close(CLOSE_SECONDS)
        if self._host is not None:
            self._host.close()
        for file in (self._samples, self._audit):
            if file is not None:
                file.close()
        return not self._thread.is_alive() and ended

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

    def _name(self, work: ModelCommand | Collect | SendDrawn) -> str:
        match work:
            case Execute() | Submit() | Reallocate() | EndSession() | Collect():
                return work.call
            case _:
                return type(work).__name__.lower()

    @contextmanager
    def _device(self, *, memory: bool) -> Iterator[None]:
        """The device for one call: what generates on it pauses. memory: also that of its caches, where the plan needs
        it."""
        apart = run_support(self.job.rollout.engine).own_devices
        engines = () if apart else self.roles.rollouts.values()
        for engine in engines:
            engine.pause()
            if memory and self.job.gives_up_caches:
                engine.release(weights=False)
        try:
            yield
        finally:
            for engine in engines:
                engine.resume()

    def _run(self, work: ModelCommand | Collect | SendDrawn) -> Reply | None:
        match work:
            case Collect(call=call):
                return self._collect(call)
            case Load():
                return self._load(work)
            case Submit():
                return self._submit(work)
            case Keep() | Forget() | SendDrawn():
                self._exchange_tokens(work)
                return None
            case Abort(groups=groups):
                for rollouts in self._rollouts.values():
                    ended = rollouts.abort(groups)
                    if rollouts is self._first:
                        self._forget(ended)  # of which there is nothing but the prompt
                return None
            case EndSession(call=call):
                self.roles.release(call)
                return None
            case Evaluate(beside=True):
                self._evaluation.begin(work)
                return None
            case Reallocate(call=call) if call in self.roles.rollouts and self.roles.updates_beside(call):
                return self._counted(work)
            case _:
                with self._device(memory=isinstance(work, Execute | Reallocate)):
                    return self._counted(work)

    def _exchange_tokens(self, work: Keep | Forget | SendDrawn) -> None:
        """Tokens that engines know of each other."""
        match work:
            case Forget(worker=worker):
                self._resources.kept.forget(worker)
            case Keep(groups=groups, keepers=keepers) if self._first is not None:
                self._first.keep(dict(zip(groups, keepers, strict=True)))
            case SendDrawn() if self._first is not None:
                self._first.share()

    def _counted(self, work: AloneCommand) -> Done:
        """Run a command that has the device, with the most bytes there were meanwhile where it is of a model."""
        memory = self._resources.memory
        memory.begin()
        done = self._run_alone(work)
        peak = memory.peak()
        memory.begin()  # what generates next is counted by itself
        planned = isinstance(work, Execute) and not work.held_out and done.call in self.job.plan.allocations
        if not planned or peak is None:
            return done
        return msgspec.structs.replace(done, metrics={**done.metrics, PEAK_BYTES: Max(float(peak))})

    def _collect(self, call: str) -> Generated | None:
        """Groups that generation has finished; on workers that only follow a head, there is nothing but its failure."""
        if call in self._rollouts:
            made = self._rollouts[call].collect(self.worker)
            if (judge := self._evaluation.take()) is not None:
                threading.Thread(target=self._judge, args=(judge,), name="evaluation", daemon=True).start()
            if made is None or (peak := self._resources.memory.peak()) is None:
                return made
            return msgspec.structs.replace(made, metrics={**made.metrics, PEAK_BYTES: Max(float(peak))})
        self.roles.rollouts[call].take(0.0)
        return None

    def _judge(self, judge: Callable[[], Done]) -> None:
        """Score the samples of an evaluation, in a thread of its own: functions may take long."""
        try:
            self._post(judge())
        except Exception as error:
            log.exception("the evaluation failed")
            self._post(failure(self.worker, "evaluate", error))

    def _run_alone(self, work: AloneCommand) -> Done:
        match work:
            case Execute(held_out=True):
                self.roles.end_prefetches()
                return msgspec.structs.replace(self._calls.run(work, lambda: None), call="evaluate")
            case Execute(call=call):
                with self.roles.prefetching(call) as early:
                    done = self._execute(work)
                came = {PREFETCHED_BYTES: Max(float(early))} if early else {}
                return msgspec.structs.replace(done, metrics={**done.metrics, **came}, ended=time.time())
            case Reallocate():
                return self._reallocate(work)
            case Save():
                self.roles.end_prefetches()
                return self._timed(work.task, "save", lambda: self._save(work.folder))
            case Evaluate():
                self.roles.end_prefetches()
                return self._evaluation.run(work)

    def _timed(self, task: int, call: str, run: Callable[[], Mapping[str, Metric] | None]) -> Done:
        began = time.time()
        metrics = run() or {}
        return Done(self.worker, task, call, metrics, started=began, ended=time.time())

    def _execute(self, work: Execute) -> Done:
        call, gaps = self.job.graph.calls[work.call], dict[str, Metric]()
        role = call.model if isinstance(call, Train) else ""
        done = self._calls.run(work, lambda: merge(gaps, self._settled(role)))
        if not role:
            return done
        for gate in self._gates:
            merge(gaps, gate.after_training(role))
        return msgspec.structs.replace(done, metrics={**done.metrics, **gaps}, ended=time.time())

    def _settled(self, role: str) -> dict[str, Metric]:
        """Before the weights of `role` change: wait until no other worker reads them. Metrics of the gates that had
        them still to look at, and the seconds that all of it took."""
        gaps, began = dict[str, Metric](), time.monotonic()
        self.roles.settle(role)
        for gate in self._gates:
            merge(gaps, gate.settle(role))
        if gaps:
            gaps[UPDATE_SECONDS] = Max(time.monotonic() - began)
        return gaps

    def _reallocate(self, work: Reallocate) -> Done:
        began = time.time()
        arrived = self.roles.reallocate(work)
        metrics: dict[str, Metric] = {}
        for gate in self._gates:
            metrics |= gate.after_reallocation(work)
        name, nbytes, ended = reallocation_node(work.call), self.roles.resident_bytes(work.call), time.time()
        return Done(self.worker, work.task, name, metrics, started=began, ended=ended, arrived=arrived, resident=nbytes)

    def _save(self, folder: str) -> dict[str, Metric]:
        gaps: dict[str, Metric] = {}
        for role in self.roles.trained:
            merge(gaps, self._settled(role))
        self.roles.save(self._resources.run_path(folder))
        return gaps

    def _load(self, work: Load) -> Loaded | Done:
        groups = work.groups
        if work.task is not None:
            loaded = self._loading.load_held_out(groups, self._assembler)
            return Done(self.worker, work.task, "evaluate", loaded=loaded)
        samples, skipped = self._loading.load_samples(groups, self._assembler)
        return Loaded(self.worker, tuple(g for g in groups if g not in skipped), samples, skipped)

    def _submit(self, work: Submit) -> Generated | None:
        rollouts = self._rollouts[work.call]
        if rollouts.engine.version < work.version:
            raise StaleWeightsError(repr(work.call), work.version, rollouts.engine.version)
        if rollouts is self._first:
            prompts, skipped, asked = self._loading.load_prompts(work.groups, self._assembler, rollouts.prompt_key)
            rollouts.submit(prompts, self.job.seed, asked)
        else:
            written, skipped = self._later.prompts(work, rollouts)
            rollouts.submit_samples(written, call_seed(self.job.seed, work.call))
        if work.keepers:
            rollouts.keep(dict(zip(work.groups, work.keepers, strict=True)))
            self._work.put(Collect(work.call))  # all of a group may be there
        return Generated(self.worker, work.call, (), (), skipped=skipped) if skipped else None
