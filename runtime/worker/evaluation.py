"""Held-out evaluation on one worker: generate, score by the graph's own function, count. Worker side."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from realgraph.graphs.functions import judged_key
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import FINISHED, TEXT, is_prompt
from realgraph.graphs.spec import Function
from realgraph.runtime.engine import Completion, Request
from realgraph.runtime.functions.functions import Unit, keywords_of
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Rollouts, StaleWeightsError
from realgraph.runtime.job.job import EvalSpec, Job
from realgraph.runtime.job.sample_ids import sample_seed
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Done, Evaluate
from realgraph.runtime.worker.function_calls import FunctionFailed
from realgraph.runtime.worker.loading import Loading, Prompt
from realgraph.runtime.worker.resources import Resources


def pass_at_k(n: int, n_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples of which `n_right` are.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k). Raises ValueError for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {n}")
    return 1.0 - math.comb(n - n_right, k) / math.comb(n, k)


def _scorers(graph: Graph, name: str) -> list[str]:
    """The function `name` after those that write what it reads, and what these read."""
    wanted, found = [name], list[str]()
    while wanted:
        found.append(wanted.pop())
        makers = graph.producers(found[-1])
        wanted += [one for one in makers if isinstance(graph.calls.get(one), Function) and one not in found]
    return [one for one in graph.calls if one in found]


class _OpenEvaluation(NamedTuple):
    """An evaluation whose samples are drawn."""

    command: Evaluate
    prompts: Sequence[Prompt]
    started: float


class Evaluation:
    """Evaluates this worker's share of the held-out rows with the engine that makes its rollouts."""

    def __init__(
        self,
        job: Job,
        loading: Loading,
        rollouts: Rollouts | None,
        host: FunctionHost,
        resources: Resources,
    ) -> None:
        self._job, self._loading, self._rollouts, self._host = job, loading, rollouts, host
        self._resources, self._worker = resources, resources.worker
        self._open: _OpenEvaluation | None = None

    def run(self, command: Evaluate) -> Done:
        """Samples, scores, and the sums of the metrics; groups that the engine is making wait meanwhile, and go on.

        Raises FunctionFailed where a sample can't be scored, StaleWeightsError for other weights than those asked for.
        """
        begun = self._begun(command)
        assert self._rollouts is not None
        return self._judged(begun, self._rollouts.complete(self._requests(begun)))

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
        return _OpenEvaluation(command, self._loading.eval_prompts(command.rows), started)

    def _requests(self, begun: _OpenEvaluation) -> list[Request]:
        """One for each sample. ids: -1 - position, which is prompt x n + sample."""
        spec, rollouts = self._job.eval, self._rollouts
        assert spec is not None and rollouts is not None
        sampling = rollouts.sampling.at(spec.n, spec.temperature)
        return [
            sampling.request(
                -1 - position * spec.n - index,
                prompt.tokens,
                sample_seed(self._job.seed, -1 - prompt.row * spec.n - index),
            )
            for position, prompt in enumerate(begun.prompts)
            for index in range(spec.n)
        ]

    def _judged(self, begun: _OpenEvaluation, done: Sequence[Completion]) -> Done:
        """Score the samples. Raises StaleWeightsError where other weights than those asked for have drawn some."""
        spec, command, prompts = self._job.eval, begun.command, begun.prompts
        assert spec is not None
        for other in {version for one in done for version in one.versions} - {command.version}:
            raise StaleWeightsError("the evaluation", command.version, other)
        completions = {-1 - one.id: one for one in done}
        texts = {index: self._loading.decode(one.tokens) for index, one in completions.items()}
        scores, failed = self._score(begun, spec, completions, texts)
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
        self, begun: _OpenEvaluation, spec: EvalSpec, completions: Mapping[int, Completion], texts: Mapping[int, str]
    ) -> tuple[dict[int, float], dict[str, Mean]]:
        """By the function of `eval.call`, after those whose keys it reads; and the share of samples of which one
        failed, where that may be."""
        graph = self._job.graph
        known: dict[int, dict[str, Any]] = {}
        for index in sorted(completions):
            made = {TEXT: texts[index], FINISHED: completions[index].finished}
            named = {f"{graph.leading}.{key}" if graph.leading else key: value for key, value in made.items()}
            known[index] = named | begun.prompts[index // spec.n].values
        failed, lenient = set[int](), False
        for name in _scorers(graph, spec.call):
            call = graph.calls[name]
            assert isinstance(call, Function), "the checks refuse others"
            failed |= self._run_function(name, call, known, beside=begun.command.beside)
            lenient |= call.on_error == "score"
        judged = judged_key(graph.calls, spec.call)
        scores = {index: float(values[judged]) for index, values in known.items()}
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
        right = {index: score >= spec.threshold for index, score in scores.items()}
        n = float(len(scores))
        metrics = {
            "accuracy": Mean(float(sum(right.values())), n),
            "reward": Mean(sum(scores.values()), n),
            "new_tokens": Mean(float(sum(len(done.tokens) for done in completions.values())), n),
            "finished": Mean(float(sum(done.finished for done in completions.values())), n),
            **skipped,
        }
        if spec.n == 1:
            return metrics
        counts = [sum(right[position * spec.n + i] for i in range(spec.n)) for position in range(n_prompts)]
        for k in spec.k:
            metrics[f"pass@{k}"] = Mean(sum(pass_at_k(spec.n, count, k) for count in counts), float(n_prompts))
        return metrics

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
