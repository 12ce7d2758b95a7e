"""Held-out evaluation on one worker: generate, score by the graph's own function, count. Worker side."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from realgraph.graphs.keys import FINISHED, TEXT, is_prompt
from realgraph.graphs.spec import Function, Inference
from realgraph.runtime.engine import Completion, Request
from realgraph.runtime.functions.functions import Unit, keywords_of
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Rollouts, StaleWeightsError
from realgraph.runtime.job.evaluations import scoring_of
from realgraph.runtime.job.job import EvalSpec, Job
from realgraph.runtime.job.sample_ids import call_seed, group_of, held_out_group, sample_id, sample_seed
from realgraph.runtime.store.assemble import Assembler, Values, decode_value
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Evaluate, Sample, Submit
from realgraph.runtime.worker.function_calls import FunctionFailed
from realgraph.runtime.worker.loading import LaterPrompts, Loading, Prompt
from realgraph.runtime.worker.resources import Resources

THRESHOLD = 0.5  # by default, of what functions score


def pass_at_k(n: int, n_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples of which `n_right` are.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k). Raises ValueError for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {n}")
    return 1.0 - math.comb(n - n_right, k) / math.comb(n, k)


class _OpenEvaluation(NamedTuple):
    """An evaluation whose samples are drawn."""

    command: Evaluate
    prompts: Sequence[Prompt]
    started: float


class _Drawn(NamedTuple):
    """Samples that lie in the store until they are judged."""

    begun: _OpenEvaluation
    completions: Sequence[Completion]


class Evaluation:
    """Evaluates this worker's share of the held-out rows with the engine that makes its rollouts."""

    def __init__(
        self,
        job: Job,
        loading: Loading,
        rollouts: Mapping[str, Rollouts],
        later: LaterPrompts,
        assembler: Assembler,
        host: FunctionHost,
        resources: Resources,
    ) -> None:
        self._job, self._loading, self._host, self._later = job, loading, host, later
        self._all, self._rollouts = rollouts, rollouts.get(next(iter(job.graph.generates), ""))
        self._assembler, self._resources, self._worker = assembler, resources, resources.worker
        self._scoring = scoring_of(job.graph, job.eval) if job.eval is not None and job.graph.generates else None
        self._open: _OpenEvaluation | None = None
        self._drawn: _Drawn | None = None

    def run(self, command: Evaluate) -> Done:
        """Samples, scores, and the sums of the metrics, or one part of it; groups that the engine is making wait
        meanwhile, and go on.

        Raises FunctionFailed where a sample can't be scored, StaleWeightsError for other weights than those asked for.
        """
        if command.part == "judge":
            return self._judge(command)
        if command.sources:
            return self._draw_later(command)
        begun = self._begun(command)
        assert self._rollouts is not None
        done = self._rollouts.complete(self._requests(begun))
        return self._judged(begun, done) if command.part == "all" else self._stored(begun, done)

    def begin(self, command: Evaluate) -> None:
        """Have the engine draw the samples beside the groups that it is making, or under the weights of a checkpoint.
        Raises StaleWeightsError, OSError."""
        assert self._rollouts is not None
        if command.checkpoint:
            role = self._job.graph.role(self._rollouts.name)
            self._rollouts.engine.load(self._resources.run_path(command.checkpoint) / role)
        self._open = self._begun(command)
        self._rollouts.submit_beside(self._requests(self._open))

    def take(self) -> Callable[[], Done] | None:
        """The rest of the evaluation that `begin` has begun, once its samples are there: scores and metrics, from any
        thread. It raises what `run` raises."""
        done = self._rollouts.take_beside() if self._rollouts is not None and self._open is not None else None
        if done is None:
            return None
        begun, self._open = self._open, None
        assert begun is not None
        return partial(self._judged, begun, done)

    def _begun(self, command: Evaluate) -> _OpenEvaluation:
        started, rollouts = time.time(), self._rollouts
        assert rollouts is not None
        if rollouts.engine.version != command.version:
            raise StaleWeightsError("the evaluation", command.version, rollouts.engine.version)
        prompts = self._loading.eval_prompts(command.rows, asked=command.part == "draw")
        return _OpenEvaluation(command, prompts, started)

    def _samples(self, begun: _OpenEvaluation) -> list[int]:
        """The number of every sample, those of a prompt side by side."""
        n = self._job.eval.n if self._job.eval is not None else 0
        return [sample_id(held_out_group(prompt.row), place) for prompt in begun.prompts for place in range(n)]

    def _requests(self, begun: _OpenEvaluation) -> list[Request]:
        """One for each sample."""
        spec, rollouts = self._job.eval, self._rollouts
        assert spec is not None and rollouts is not None
        sampling = rollouts.sampling.at(spec.n, spec.temperature)
        return [
            sampling.request(
                sample_id(held_out_group(prompt.row), index),
                prompt.tokens,
                sample_seed(self._job.seed, -1 - prompt.row * spec.n - index),
            )
            for prompt in begun.prompts
            for index in range(spec.n)
        ]

    # --- samples that models score ------------------------------------------------------------------------------------

    def _stored(self, begun: _OpenEvaluation, done: Sequence[Completion]) -> Done:
        """Put samples and what the data say of them into the store, for other calls."""
        assert self._rollouts is not None
        groups = [held_out_group(prompt.row) for prompt in begun.prompts]
        for key in begun.prompts[0].values if begun.prompts else ():
            self._assembler.put_values(key, groups, [prompt.values[key] for prompt in begun.prompts])
        of_group = dict(zip(groups, begun.prompts, strict=True))
        tokens = {one.id: of_group[group_of(one.id)].tokens for one in done}
        asked = {group: prompt.asked for group, prompt in of_group.items() if prompt.asked is not None}
        loaded = self._rollouts.store(tokens, done, asked)
        self._drawn = _Drawn(begun, done)
        return self._stored_reply(begun.command, begun.started, loaded)

    def _draw_later(self, command: Evaluate) -> Done:
        """Draw the samples of a later generate call, whose prompts others have written. Raises PromptError."""
        started, rollouts = time.time(), self._all[command.call]
        if rollouts.engine.version < command.version:
            raise StaleWeightsError(repr(command.call), command.version, rollouts.engine.version)
        groups = dict.fromkeys(group_of(sample) for source in command.sources for sample in source.samples)
        asked = Submit(command.call, tuple(groups), command.version, command.sources)
        written, _ = self._later.prompts(asked, rollouts)
        prompts = {sample: tokens for own in written.values() for sample, tokens in own.items()}
        seed = call_seed(self._job.seed, command.call)
        requests = [rollouts.sampling.request(one, prompts[one], sample_seed(seed, one)) for one in prompts]
        return self._stored_reply(command, started, rollouts.store(prompts, rollouts.complete(requests)))

    def _stored_reply(self, command: Evaluate, started: float, loaded: tuple[Sample, ...]) -> Done:
        return Done(self._worker, command.task, "evaluate", started=started, ended=time.time(), loaded=loaded)

    def _judge(self, command: Evaluate) -> Done:
        """Score the samples that were drawn, by what other calls have written about them."""
        assert self._drawn is not None
        begun, done = self._drawn
        named = {sample for source in command.sources for sample in source.samples}
        prompts = [prompt for prompt in begun.prompts if sample_id(held_out_group(prompt.row), 0) in named]
        values = self._assembler.gather(command.sources, named)
        self._drawn = None
        return self._judged(
            begun._replace(command=command, prompts=prompts), [one for one in done if one.id in named], values
        )

    # --- scores -------------------------------------------------------------------------------------------------------

    def _judged(self, begun: _OpenEvaluation, done: Sequence[Completion], values: Values | None = None) -> Done:
        """Score the samples. values: what was gathered of them. Raises StaleWeightsError where other weights than those
        asked for have drawn some."""
        spec, command, prompts = self._job.eval, begun.command, begun.prompts
        assert spec is not None
        for other in {version for one in done for version in one.versions} - {command.version}:
            raise StaleWeightsError("the evaluation", command.version, other)
        by_sample = {one.id: one for one in done}
        completions = {place: by_sample[sample] for place, sample in enumerate(self._samples(begun))}
        texts = {index: self._loading.decode(one.tokens) for index, one in completions.items()}
        scores, failed = self._score(begun, completions, texts, values or {})
        return Done(
            worker=self._worker,
            task=command.task,
            call="evaluate",
            metrics=self._metrics(begun, spec, scores, completions) | failed,
            started=begun.started,
            ended=time.time(),
            transcripts=self._transcripts(spec, prompts, texts, scores),
        )

    def _score(
        self,
        begun: _OpenEvaluation,
        completions: Mapping[int, Completion],
        texts: Mapping[int, str],
        values: Values,
    ) -> tuple[dict[int, float], dict[str, Mean]]:
        """By the functions that run here, after what was gathered of other calls; and the share of samples of which one
        failed, where that may be."""
        graph, scoring, spec = self._job.graph, self._scoring, self._job.eval
        assert scoring is not None and spec is not None
        known: dict[int, dict[str, Any]] = {}
        for index, one in completions.items():
            made = {TEXT: texts[index], FINISHED: one.finished}
            named = {f"{graph.leading}.{key}" if graph.leading else key: value for key, value in made.items()}
            known[index] = named | begun.prompts[index // spec.n].values
            for key in scoring.gathered:
                value = self._assembler.value(values, key, one.id)
                known[index][key] = decode_value(value, graph.keys[key].type)
        failed, lenient = set[int](), False
        for name in scoring.beside:
            call = graph.calls[name]
            assert isinstance(call, Function), "the checks refuse others"
            failed |= self._run_function(name, call, known, beside=begun.command.beside)
            lenient |= call.on_error == "score"
        scores = {index: float(one[scoring.key]) for index, one in known.items()}
        return scores, {"failed": Mean(float(len(failed)), float(len(scores)))} if lenient and scores else {}

    def _run_function(
        self, name: str, call: Function, known: Mapping[int, dict[str, Any]], *, beside: bool
    ) -> set[int]:
        """Add what a function writes to what is known of each sample. Returns those of which it failed, if it may."""
        graph = self._job.graph
        units = []
        for index, values in known.items():
            given = {key: values[key] for key in graph.reads[name]}
            prompts_read = [key for key in given if is_prompt(graph.keys[key].type)]
            units.append(Unit((index,), keywords_of(call, given, prompts_read, self._loading.decode)))
        size = 1 if beside else max(1, len(units))  # one after the other, so that functions of groups get their turns
        parts = [units[start : start + size] for start in range(0, len(units), size)]
        results = [result for part in parts for result in self._host.run(name, call, part)]
        for unit, result in zip(units, results, strict=True):
            if result.error and call.on_error == "fail":
                raise FunctionFailed(result)
            known[unit.samples[0]].update(result.values)
        return {unit.samples[0] for unit, result in zip(units, results, strict=True) if result.error}

    def _metrics(
        self,
        begun: _OpenEvaluation,
        spec: EvalSpec,
        scores: Mapping[int, float],
        completions: Mapping[int, Completion],
    ) -> dict[str, Mean]:
        """Sums over this worker's prompts: they merge with those of the others. skipped: share of rows left out, whose
        prompts are too long."""
        n_prompts, n_rows = len(begun.prompts), len(begun.command.rows)
        skipped = {"skipped": Mean(float(n_rows - n_prompts), float(n_rows))}
        if not scores:
            return skipped
        n = float(len(scores))
        metrics = {
            "reward": Mean(sum(scores.values()), n),
            "new_tokens": Mean(float(sum(len(done.tokens) for done in completions.values())), n),
            "finished": Mean(float(sum(done.finished for done in completions.values())), n),
            **skipped,
        }
        threshold = self._threshold(spec)
        if threshold is None:
            return metrics
        right = {index: score >= threshold for index, score in scores.items()}
        metrics = {"accuracy": Mean(float(sum(right.values())), n), **metrics}
        if spec.n == 1:
            return metrics
        counts = [sum(right[position * spec.n + i] for i in range(spec.n)) for position in range(n_prompts)]
        for k in spec.k:
            metrics[f"pass@{k}"] = Mean(sum(pass_at_k(spec.n, count, k) for count in counts), float(n_prompts))
        return metrics

    def _threshold(self, spec: EvalSpec) -> float | None:
        """The least score of a sample that is right; None where none is."""
        by_model = self._scoring is not None and isinstance(self._job.graph.calls[self._scoring.call], Inference)
        return THRESHOLD if spec.threshold is None and not by_model else spec.threshold

    def _transcripts(
        self, spec: EvalSpec, prompts: Sequence[Prompt], texts: Mapping[int, str], scores: Mapping[int, float]
    ) -> tuple[str, ...]:
        """The first samples of this worker's share."""
        shown = range(0, min(len(prompts), self._job.outputs.transcripts) * spec.n, spec.n)
        return tuple(
            show(self._loading.decode(prompts[i // spec.n].tokens), texts[i], scores[i]) for i in shown if i in texts
        )


def show(prompt: str, text: str, score: float) -> str:
    """A sample for people."""
    return f"{prompt}{text}  [{score:.3g}]"
