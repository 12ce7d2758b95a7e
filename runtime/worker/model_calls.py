"""Inference, advantage and train calls of one worker: gather a share, run the engine, store what it wrote."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from realgraph.graphs.applied import applied_of
from realgraph.graphs.infer import is_own
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, MASK, TOKENS, own_tokens
from realgraph.graphs.spec import Advantage, Inference, Train
from realgraph.planner.plan.axes import coordinates_of, is_head, rank_workers
from realgraph.planner.plan.plan import Allocation
from realgraph.runtime.algorithms import advantages
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainOptions
from realgraph.runtime.functions.functions import load_applied
from realgraph.runtime.generate.rollouts import StaleWeightsError
from realgraph.runtime.job.audit import Audit, AuditRecord
from realgraph.runtime.job.job import Job
from realgraph.runtime.store.assemble import Assembler, Values
from realgraph.runtime.store.inputs import Inputs
from realgraph.runtime.store.shares import Share
from realgraph.runtime.wire.metrics import ArrivedBytes, Mean, Metric
from realgraph.runtime.wire.protocol import Done, Execute
from realgraph.runtime.worker.roles import Roles
from realgraph.runtime.worker.samples import Lines


class TooLongForRole(Exception):
    """A sample is longer, cut by the tokenizer of the role that reads it, than the model of this role can take."""


def _refuse_long(call: Inference, batch: Packed, positions: int) -> None:
    for sample, length in zip(batch.samples, batch.lengths, strict=True):
        if length > positions:
            text = f"sample {sample} has {length} tokens of {call.model!r}, whose model has {positions} positions"
            raise TooLongForRole(f"{text}: lower data.max_prompt_tokens or batch.max_new_tokens")


def rank_share(allocations: Mapping[str, Allocation], worker: int) -> Callable[[str, int], Share | None]:
    """By a call and the number of its task: the workers of this one's data-parallel rank, which gather the same."""

    def share(call: str, task: int) -> Share | None:
        if call not in allocations:
            return None
        layout = allocations[call].layout
        return Share(task, rank_workers(layout, coordinates_of(layout, worker).dp))

    return share


class ModelCalls:
    """Runs the calls that work on packed batches. Used by the compute thread alone."""

    def __init__(
        self, job: Job, assembler: Assembler, inputs: Inputs, roles: Roles, worker: int, audit: Lines | None
    ) -> None:
        """inputs: of commands, begun as these come. audit: the file that takes what each loss has used, if any."""
        self._graph, self._assembler, self._roles, self._worker = job.graph, assembler, roles, worker
        self._inputs, self._share = inputs, rank_share(job.plan.allocations, worker)
        entries = applied_of(job.graph.calls)
        applied = {f"{entry.path}.fn": entry.fn for entry in entries if entry.kind == "step"}
        self._steps = load_applied(applied, job.user_dir)
        self._allocations = job.plan.allocations
        self._trained = {call.model for call in job.graph.calls.values() if isinstance(call, Train)}
        self._arrived = ArrivedBytes()  # for the call in hand
        self._audit = audit

    def run(self, command: Execute, before_step: Callable[[], None]) -> Done:
        """Run one call on this worker's share; what it writes is in the store afterwards. before_step: see
        `TrainEngine.train`."""
        started = time.time()
        self._arrived = ArrivedBytes()
        call = self._graph.calls[command.call]
        state = dict(command.state)
        metrics: Mapping[str, Metric]
        match call:
            case Inference():
                metrics = self._infer(call, command)
            case Advantage():
                metrics, state = self._advantage(call, command)
            case Train():
                metrics = self._train(call, command, before_step)
            case _:
                raise AssertionError(f"{command.call!r} is not for an engine")
        return Done(
            worker=self._worker,
            task=command.task,
            call=command.call,
            metrics=metrics,
            state=state,
            started=started,
            ended=time.time(),
            arrived=self._arrived,
            resident=self._roles.resident_bytes(command.call),
        )

    def _gathered(self, command: Execute) -> Values:
        """To be called once a command."""
        values = self._inputs.take(command)
        share = self._share(command.call, command.task)
        self._arrived += self._assembler.arrived(command.sources, values, share)
        return values

    def _check_version(self, command: Execute) -> None:
        present = self._roles.engines[command.call].version
        if self._graph.role(command.call) in self._trained and present != command.version:
            raise StaleWeightsError(repr(command.call), command.version, present)

    def _infer(self, call: Inference, command: Execute) -> dict[str, Mean]:
        self._check_version(command)
        (samples,) = command.shares
        engine = self._roles.engines[command.call]
        batch = self._packed(command.call, self._gathered(command), samples)
        if is_own(call):
            _refuse_long(call, batch, engine.max_positions)
        outputs = engine.inference(batch, call.output, call.temperature)
        self._roles.release(command.call)
        if not is_head(self._allocations[command.call].layout, self._worker):
            return {}  # all workers of a data-parallel rank know the same outputs: its head has them for all
        self._assembler.put_packed(call.writes[0], outputs, batch)
        if call.output == "scores":
            return {call.writes[0]: Mean(float(outputs.sum()), float(batch.n_samples))}
        sampled = batch.mask.cpu()
        return {call.writes[0]: Mean(float(outputs[sampled].sum()), float(sampled.sum()))} if sampled.any() else {}

    def _advantage(self, call: Advantage, command: Execute) -> tuple[dict[str, Mean], dict[str, float]]:
        (samples,) = command.shares
        batch = self._packed(command.call, self._gathered(command), samples)
        outputs, state, metrics = advantages.compute(call, batch, dict(command.state), self._steps)
        for name in self._graph.writes[command.call]:
            self._assembler.put_packed(name, outputs[name], batch)
        return metrics, state

    def _train(self, call: Train, command: Execute, before_step: Callable[[], None]) -> Mapping[str, Metric]:
        self._check_version(command)
        minibatches = self._minibatches(command)
        engine = self._roles.trained[call.model]
        if command.held_out:
            return engine.evaluate(call, minibatches[0])
        self._roles.keep(call.model)
        recompute = self._allocations[command.call].recompute
        used: Audit | None = None if self._audit is None else []
        metrics = engine.train(call, minibatches, TrainOptions(recompute, used, before_step))
        if self._audit is not None and used is not None:
            self._write_audit(self._audit, command, used)
        self._roles.average(call.model)
        self._roles.weights_changed(engine)
        return metrics

    def _write_audit(self, file: Lines, command: Execute, used: Audit) -> None:
        if is_head(self._allocations[command.call].layout, self._worker):
            place = command.call, command.step, command.version, self._worker
            file.write(AuditRecord(*place, time.time(), tuple(used)))

    def _minibatches(self, command: Execute) -> list[Packed]:
        """This rank's share of each mini-batch, on the device."""
        values = self._gathered(command)
        device = self._roles.engines[command.call].device
        for name in (TOKENS, MASK):
            values.setdefault(self._own_name(command.call, name), {})  # a rank may have no sample at all
        key = self._own_name(command.call, BEHAVIOUR_LOGPROBS)
        holders = {s: source.worker for source in command.sources if key in source.keys for s in source.samples}
        batches = [self._packed(command.call, values, share).to(device) for share in command.shares]
        engines = [tuple(holders.get(sample, -1) for sample in batch.samples) for batch in batches]
        return [replace(batch, engines=those) for batch, those in zip(batches, engines, strict=True)]

    def _own_name(self, name: str, key: str) -> str:
        """The full name of a key of the samples on which a call works."""
        sampler = self._graph.samplers.get(name)
        return f"{sampler}.{key}" if sampler else key

    def _packed(self, name: str, values: Values, samples: Sequence[int]) -> Packed:
        """The batch of a call, whose keys have their plain names."""
        call = self._graph.calls[name]
        sequence = own_tokens(call.model) if is_own(call) else self._own_name(name, TOKENS)
        return self._assembler.packed(values, samples, sequence, self._graph.samplers.get(name, ""))
