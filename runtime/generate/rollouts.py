"""The generate call of one worker: prompts in, whole groups of samples out. Owns the groups in flight."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, FINISHED, GENERATED, MASK, ROUTES, TEXT, TOKENS, VERSIONS
from realgraph.graphs.spec import Generate
from realgraph.runtime.data.data import PromptConversation
from realgraph.runtime.data.own_tokens import OwnTokens
from realgraph.runtime.data.stops import Stops
from realgraph.runtime.engine import Completion, Request, RolloutEngine
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.wire.protocol import Generated, Mean, Sample

PROMPT_VERSION = -1  # of tokens that no policy sampled
TAKE_SECONDS = 60.0  # of one wait; where the engine has failed it ends at once


class StaleWeightsError(Exception):
    """A call was sent for another version of a role's weights than this worker has: a bug of the scheduler."""

    def __init__(self, call: str, needed: int, held: int) -> None:
        super().__init__(f"{call} needs version {needed} of its weights, this worker has {held}")


@dataclass(frozen=True)
class Sampling:
    """The sampling of a generate call, and what ends a sample."""

    n: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stops: Stops

    @staticmethod
    def of(call: Generate, max_new_tokens: int, stops: Stops) -> "Sampling":
        return Sampling(
            n=call.n,
            max_new_tokens=call.most_new_tokens(max_new_tokens),
            temperature=call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            stops=stops,
        )

    def at(self, n: int, temperature: float) -> "Sampling":
        """The same, for an evaluation: its own number and temperature, nothing truncated."""
        return replace(self, n=n, temperature=temperature, top_p=1.0, top_k=0)

    def request(self, sample: int, prompt: Sequence[int], seed: int) -> Request:
        """The request for one sample."""
        return Request(
            id=sample,
            prompt=tuple(prompt),
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_tokens=self.stops.tokens,
            stop_strings=self.stops.strings,
        )


def sample_seed(seed: int, sample: int) -> int:
    """63 bits that depend on the run's seed and the sample alone, so that a resumed run draws the same tokens."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Texts:
    """From tokens to text, and on to the tokens of roles with tokenizers of their own, by key."""

    decode: Callable[[Sequence[int]], str]
    own: Mapping[str, OwnTokens] = field(default_factory=dict)


@dataclass
class _Group:
    id: int
    prompt: Sequence[int]
    started: float
    asked: PromptConversation | None = None
    completions: dict[int, Completion] = field(default_factory=dict)


class Rollouts:
    """Runs one generate call on one engine and streams finished groups. Used by one thread."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        sampling: Sampling,
        prompt_key: str,
        assembler: Assembler,
        texts: Texts,
        mask_unfinished: bool = False,
    ) -> None:
        self.name, self.engine, self.sampling = name, engine, sampling
        self.prompt_key = prompt_key
        self._assembler, self._texts = assembler, texts
        self._groups: dict[int, _Group] = {}
        self.newest_prompt: tuple[int, ...] = ()
        self._mask_unfinished = mask_unfinished
        self._reported = 0.0  # when the last groups ended: reports do not overlap

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Run other requests to their end at once; the groups in flight wait meanwhile, and go on with their tokens."""
        done: list[Completion] = []
        with self.engine.set_aside():
            self.engine.submit(requests)
            while len(done) < len(requests):
                done += self.engine.take(TAKE_SECONDS)
        return done

    def submit(
        self, prompts: Mapping[int, Sequence[int]], seed: int, asked: Mapping[int, PromptConversation] | None = None
    ) -> None:
        """Queue the samples of groups, each given its prompt's tokens; `asked`: the prompts for other tokenizers."""
        requests = []
        for group, prompt in prompts.items():
            self._groups[group] = _Group(group, prompt, time.time(), (asked or {}).get(group))
            self.newest_prompt = tuple(prompt)
            first = group * self.sampling.n
            for sample in range(first, first + self.sampling.n):
                requests.append(self.sampling.request(sample, prompt, sample_seed(seed, sample)))
        self.engine.submit(requests)

    def abort(self, groups: Sequence[int]) -> None:
        """Forget groups, running or queued."""
        for group in groups:
            if self._groups.pop(group, None) is not None:
                first = group * self.sampling.n
                self.engine.abort(range(first, first + self.sampling.n))

    def collect(self, worker: int) -> Generated | None:
        """The groups that what the engine has finished completes, their keys in the store; None for no group."""
        done: list[int] = []
        for completion in self.engine.take(0.0):
            group = self._groups[completion.id // self.sampling.n]
            group.completions[completion.id] = completion
            if len(group.completions) == self.sampling.n:
                done.append(completion.id // self.sampling.n)
        if not done:
            return None
        started = max(self._reported, min(self._groups[group].started for group in done))
        samples = self._store([self._groups.pop(group) for group in sorted(done)])
        new_tokens = float(sum(sample.n_new_tokens for sample in samples))
        n, load = float(len(samples)), self.engine.status()
        metrics = {
            "new_tokens": Mean(new_tokens, n),
            "prompt_tokens": Mean(float(sum(s.n_tokens for s in samples)) - new_tokens, n),
            "finished": Mean(float(sum(s.finished for s in samples)), n),
            "running": Mean(float(load.running), 1.0),
            "waiting": Mean(float(load.waiting), 1.0),
        }
        self._reported = time.time()
        return Generated(
            worker=worker,
            call=self.name,
            groups=tuple(sorted(done)),
            samples=tuple(samples),
            metrics=metrics,
            started=started,
            ended=self._reported,
        )

    def _store(self, groups: Sequence[_Group]) -> list[Sample]:
        """Put the keys that generate writes into the store, key by key for all samples at once."""
        columns: dict[str, list[Any]] = {key: [] for key in (*GENERATED, *self._texts.own)}
        samples, routes = [], []
        for group in groups:
            n_prompt = len(group.prompt)
            zeros, unsampled, hidden = [0.0] * n_prompt, [PROMPT_VERSION] * n_prompt, [False] * n_prompt
            for sample, done in sorted(group.completions.items()):
                counts = done.finished or not self._mask_unfinished
                n_new = len(done.tokens)
                columns[TOKENS].append([*group.prompt, *done.tokens])
                columns[MASK].append([*hidden, *([counts] * n_new)])
                columns[BEHAVIOUR_LOGPROBS].append([*zeros, *done.logprobs])
                columns[VERSIONS].append([*unsampled, *done.versions])
                columns[TEXT].append(self._texts.decode(done.tokens))
                columns[FINISHED].append(done.finished)
                routes += [] if done.routes is None else [done.routes]
                for key, own in self._texts.own.items():
                    columns[key].append(self._cut(own, group, columns[TEXT][-1], done.finished))
                oldest = min(done.versions, default=self.engine.version)
                lengths = tuple(len(columns[key][-1]) for key in self._texts.own)
                samples.append(Sample(sample, n_prompt + n_new, n_new, done.finished, oldest, lengths))
        ids = [sample.sample for sample in samples]
        for key, values in columns.items():
            self._assembler.put_values(key, ids, values)
        if routes:
            self._assembler.put_tensors(ROUTES, ids, routes)
        return samples

    @staticmethod
    def _cut(own: OwnTokens, group: _Group, text: str, finished: bool) -> list[int]:
        """A sample's text after its prompt in another role's tokens. Raises ValueError naming the group."""
        assert group.asked is not None
        try:
            return own.tokens(group.asked.conversation, text, finished=finished, tools=group.asked.tools)
        except ValueError as error:
            raise ValueError(f"a sample of group {group.id} can't be cut for {own.role!r}: {error}") from error
