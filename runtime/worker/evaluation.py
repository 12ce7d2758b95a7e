"""Held-out evaluation on one worker: generate, score by the graph's own function, count. Worker side."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.keys import FINISHED, GENERATED, TEXT, is_prompt
from realgraph.graphs.spec import Function
from realgraph.runtime.engine import Completion
from realgraph.runtime.functions.functions import Unit, keywords_of
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Rollouts, StaleWeightsError, sample_seed
from realgraph.runtime.job.job import EvalSpec, Job
from realgraph.runtime.wire.protocol import Done, Evaluate, Mean
from realgraph.runtime.worker.function_calls import FunctionFailed
from realgraph.runtime.worker.loading import Loading, Prompt

EVALUATION_KEYS = (TEXT, FINISHED)  # generated keys that an evaluation has; inputs are the others


def pass_at_k(n: int, n_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples of which `n_right` are.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k). Raises ValueError for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {n}")
    return 1.0 - math.comb(n - n_right, k) / math.comb(n, k)


def check_eval(job: Job, spec: EvalSpec) -> Function:
    """The function that scores. Raises ConfigError where it can't score samples alone."""
    call = job.graph.calls.get(spec.call)
    problems = []
    if not isinstance(call, Function) or call.over != "sample":
        text = f"{spec.call!r} is no function call over samples, so it can't score held-out samples"
        raise ConfigError([Problem(Where(path="$.eval.call"), text, "name the reward function's call")])
    inputs = {key.name for key in job.graph.inputs}
    for key in job.graph.reads[spec.call]:
        if key not in EVALUATION_KEYS and key not in inputs:
            what = "a generated key" if key in GENERATED else "the key of another call"
            text = f"{spec.call!r} reads {key!r}, {what} that an evaluation does not have"
            hint = f"it may read {', '.join(EVALUATION_KEYS)} and inputs"
            problems.append(Problem(Where(path="$.eval.call"), text, hint))
    numbers = [k for k in job.graph.writes[spec.call] if job.graph.keys[k].type.dtype in ("float32", "float64", "bool")]
    if not numbers:
        text = f"{spec.call!r} writes no number to judge samples by"
        problems.append(Problem(Where(path="$.eval.call"), text))
    for k in spec.k:
        if k > spec.n:
            text = f"pass@{k} needs at least {k} samples a prompt, but eval.n is {spec.n}"
            problems.append(Problem(Where(path="$.eval.k"), text, f"set eval.n to {k} or more"))
    if problems:
        raise ConfigError(problems)
    return call


class Evaluation:
    """Evaluates this worker's share of the held-out rows with the engine that makes its rollouts."""

    def __init__(self, job: Job, loading: Loading, rollouts: Rollouts | None, host: FunctionHost, worker: int) -> None:
        self._job, self._loading, self._rollouts, self._host, self._worker = job, loading, rollouts, host, worker

    def run(self, command: Evaluate) -> Done:
        """Samples, scores, and the sums of the metrics; groups that the engine is making wait meanwhile, and go on.

        Raises FunctionFailed where a sample can't be scored, StaleWeightsError for other weights than those asked for.
        """
        started = time.time()
        spec = self._job.eval
        assert spec is not None and self._rollouts is not None
        if self._rollouts.engine.version != command.version:
            raise StaleWeightsError("the evaluation", command.version, self._rollouts.engine.version)
        call = check_eval(self._job, spec)
        prompts = self._loading.eval_prompts(command.rows)
        completions = self._generate(self._rollouts, spec, prompts)
        texts = {index: self._loading.decode(done.tokens) for index, done in completions.items()}
        scores = self._score(call, spec, prompts, completions, texts)
        return Done(
            worker=self._worker,
            task=command.task,
            call="evaluate",
            metrics=self._metrics(spec, len(prompts), scores, completions),
            started=started,
            ended=time.time(),
            transcripts=self._transcripts(spec, prompts, texts, scores),
        )

    def _generate(self, rollouts: Rollouts, spec: EvalSpec, prompts: Sequence[Prompt]) -> Mapping[int, Completion]:
        """Completions by position: prompt x n + sample."""
        sampling = rollouts.sampling.at(spec.n, spec.temperature)
        requests = [
            sampling.request(
                position * spec.n + index,
                prompt.tokens,
                sample_seed(self._job.seed, -1 - prompt.row * spec.n - index),
            )
            for position, prompt in enumerate(prompts)
            for index in range(spec.n)
        ]
        return {done.id: done for done in rollouts.complete(requests)}

    def _score(
        self,
        call: Function,
        spec: EvalSpec,
        prompts: Sequence[Prompt],
        completions: Mapping[int, Completion],
        texts: Mapping[int, str],
    ) -> dict[int, float]:
        units, graph = [], self._job.graph
        for index in sorted(completions):
            known: dict[str, Any] = {TEXT: texts[index], FINISHED: completions[index].finished}
            known |= prompts[index // spec.n].values
            given = {key: known[key] for key in graph.reads[spec.call]}
            prompts_read = [key for key in given if is_prompt(graph.keys[key].type)]
            units.append(Unit((index,), keywords_of(call, given, prompts_read, self._loading.decode)))
        results = self._host.run(spec.call, call, units)
        name = next(iter(self._job.graph.writes[spec.call]))
        scores: dict[int, float] = {}
        for unit, result in zip(units, results, strict=True):
            if result.error and call.on_error == "fail":
                raise FunctionFailed(result)
            scores[unit.samples[0]] = float(result.values[name])
        return scores

    def _metrics(
        self, spec: EvalSpec, n_prompts: int, scores: Mapping[int, float], completions: Mapping[int, Completion]
    ) -> dict[str, Mean]:
        """Sums over this worker's prompts: they merge with those of the others."""
        right = {index: score >= spec.threshold for index, score in scores.items()}
        n = float(len(scores))
        metrics = {
            "accuracy": Mean(float(sum(right.values())), n),
            "reward": Mean(sum(scores.values()), n),
            "new_tokens": Mean(float(sum(len(done.tokens) for done in completions.values())), n),
            "finished": Mean(float(sum(done.finished for done in completions.values())), n),
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
