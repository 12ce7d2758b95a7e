"""A generate call of one worker: prompts in, whole groups of samples out. Owns the groups in flight."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, FINISHED, GENERATED, MASK, ROUTES, TEXT, TOKENS, VERSIONS
from realgraph.graphs.spec import Generate
from realgraph.runtime.data.data import PromptConversation
from realgraph.runtime.data.own_tokens import OwnTokens
from realgraph.runtime.data.stops import Stops
from realgraph.runtime.drawn.sharing import TokenSharing
from realgraph.runtime.drawn.tokens import DrawnTokens, pack
from realgraph.runtime.engine import Completion, Request, RolloutEngine
from realgraph.runtime.job.sample_ids import group_of, place_of, sample_ids, sample_seed
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.wire.metrics import Mean
from realgraph.runtime.wire.protocol import Generated, Sample

log = logging.getLogger(__name__)

PROMPT_VERSION = -1  # of tokens that no policy sampled
TAKE_SECONDS = 60.0  # of one wait; where the engine has failed it ends at once


class StaleWeightsError(Exception):
    """A call was sent for another version of a role's weights than this worker has: a bug of the scheduler."""

    def __init__(self, call: str, needed: int, present: int) -> None:
        super().__init__(f"{call} needs version {needed} of its weights, this worker has {present}")


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

    def request(self, sample: int, prompt: Sequence[int], seed: int, drawn: DrawnTokens | None = None) -> Request:
        """The request for one sample. drawn: of its first tokens, by another engine."""
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
            drawn=drawn,
        )


@dataclass(frozen=True)
class Texts:
    """From tokens to text, and on to the tokens of roles with tokenizers of their own, by key."""

    decode: Callable[[Sequence[int]], str]
    own: Mapping[str, OwnTokens] = field(default_factory=dict)


@dataclass(frozen=True)
class Writes:
    """The keys that a generate call writes: plain name -> key of the graph. n: samples of each group; of_group: just
    one, and the keys are the group's."""

    keys: Mapping[str, str]
    n: int
    of_group: bool = False

    @staticmethod
    def of(graph: Graph, name: str) -> "Writes":
        """Those of a call of the graph."""
        several = len(graph.generates) > 1
        names = {plain: f"{name}.{plain}" if several else plain for plain in (*GENERATED, ROUTES)}
        keys = {plain: key for plain, key in names.items() if key in graph.writes[name]}
        of_group = graph.keys[keys[TOKENS]].type.level == "group"
        return Writes(keys, 1 if of_group else graph.samples_per_group, of_group)


@dataclass(frozen=True)
class Peers:
    """Other engines: what they draw is kept here, and what is drawn here by them. one_version: a sample of several
    versions is of no use (`interrupt: wait`)."""

    sharing: TokenSharing
    one_version: bool = False


@dataclass
class _Group:
    id: int
    prompts: Mapping[int, Sequence[int]]  # of each sample
    started: float
    asked: PromptConversation | None = None
    completions: dict[int, Completion] = field(default_factory=dict)
    samples: dict[int, Sample] = field(default_factory=dict)  # of completions, those whose keys are in the store

    @property
    def n_tokens(self) -> int:
        """Tokens of the samples that have ended, with their prompts'."""
        return sum(len(self.prompts[number]) + len(done.tokens) for number, done in self.completions.items())


def _completion(drawn: DrawnTokens) -> Completion:
    """A sample that ended elsewhere."""
    tokens, logprobs, versions = drawn.lists()
    return Completion(drawn.sample, tuple(tokens), tuple(logprobs), tuple(versions), drawn.finished)


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
        writes: Writes,
        mask_unfinished: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self.name, self.engine, self.sampling = name, engine, sampling
        self.prompt_key, self.writes = prompt_key, writes
        self._assembler, self._texts = assembler, texts
        self._groups: dict[int, _Group] = {}
        self.newest_prompt: tuple[int, ...] = ()
        self._mask_unfinished = mask_unfinished
        self._reported = 0.0  # when the last groups ended: reports do not overlap
        self._beside: list[Completion] = []  # of `submit_beside`, as far as they have finished
        self._n_beside = 0
        self._peers = peers
        self._whole: list[int] = []  # groups that need nothing more of the engine
        self._n_moved = 0  # tokens that other engines have drawn of groups, since the last report
        # is told of samples that have ended before their groups have, and whose keys are in the store
        self.ended: Callable[[Sequence[int]], None] | None = None

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Run other requests to their end at once; the groups in flight wait meanwhile, and go on with their tokens."""
        done: list[Completion] = []
        with self.engine.set_aside():
            self.engine.submit(requests)
            while len(done) < len(requests):
                done += self.engine.take(TAKE_SECONDS)
        return done

    def store(
        self,
        prompts: Mapping[int, Sequence[int]],
        done: Sequence[Completion],
        asked: Mapping[int, PromptConversation] | None = None,
    ) -> tuple[Sample, ...]:
        """Put samples that `complete` has made into the store as those of groups are. prompts: of each sample; `asked`:
        of groups, for other tokenizers."""
        groups: dict[int, _Group] = {}
        for one in done:
            number = group_of(one.id)
            group = groups.setdefault(number, _Group(number, prompts, time.time(), (asked or {}).get(number)))
            group.completions[one.id] = one
        self._store([*groups.values()])
        return tuple([sample for group in groups.values() for sample in group.samples.values()])

    def submit_beside(self, requests: Sequence[Request]) -> None:
        """Queue other requests beside those of groups, with ids below 0: `take_beside` has them when all have ended."""
        assert not self._n_beside, "others are under way"
        self._n_beside = len(requests)
        self.engine.submit(requests)

    def take_beside(self) -> list[Completion] | None:
        """The samples that `submit_beside` asked for, once all have ended; until then None."""
        if len(self._beside) < self._n_beside:
            return None
        done, self._beside, self._n_beside = self._beside, [], 0
        return done

    def submit(
        self, prompts: Mapping[int, Sequence[int]], seed: int, asked: Mapping[int, PromptConversation] | None = None
    ) -> None:
        """Queue the samples of groups, each given its prompt's tokens; `asked`: the prompts for other tokenizers. What
        other engines have drawn of them is not drawn again."""
        samples = {group: dict.fromkeys(self.samples_of(group), prompt) for group, prompt in prompts.items()}
        self.submit_samples(samples, seed, asked)

    def samples_of(self, group: int) -> range:
        """The numbers of a group's samples of this call, where it makes them of the data."""
        return sample_ids(group, self.writes.n)

    def samples_beside(self, group: int, others: Iterable[int]) -> Iterable[int]:
        """The numbers of the samples that this call makes beside `others`: those of the group."""
        return self.samples_of(group) if self.writes.of_group else others

    def _seed(self, seed: int, sample: int) -> int:
        """The seed of a sample's draws. It counts samples as if all groups had the call's `n`, as former releases did:
        their runs go on with the same tokens."""
        return sample_seed(seed, group_of(sample) * self.writes.n + place_of(sample))

    def submit_samples(
        self,
        groups: Mapping[int, Mapping[int, Sequence[int]]],
        seed: int,
        asked: Mapping[int, PromptConversation] | None = None,
    ) -> None:
        """The same where each sample has a prompt of its own."""
        requests = []
        drawn = self._drawn([sample for prompts in groups.values() for sample in prompts])
        for group, prompts in groups.items():
            entry = self._groups[group] = _Group(group, prompts, time.time(), (asked or {}).get(group))
            for sample, prompt in prompts.items():
                self.newest_prompt = tuple(prompt)
                known = drawn.get(sample)
                if known is not None and known.ended:
                    entry.completions[sample] = _completion(known)
                else:
                    requests.append(self.sampling.request(sample, prompt, self._seed(seed, sample), known))
            if len(entry.completions) == len(prompts):
                self._whole.append(group)
        self.engine.submit(requests)

    def _drawn(self, samples: Sequence[int]) -> Mapping[int, DrawnTokens]:
        """The tokens of samples that other engines have drawn and this one goes on from."""
        if self._peers is None or not (drawn := self._peers.sharing.kept.pop(samples)):
            return {}
        if self._peers.one_version:
            mine = {self.engine.version}
            drawn = {sample: one for sample, one in drawn.items() if one.ended or set(one.lists()[2]) <= mine}
        self._n_moved += sum(one.n for one in drawn.values())
        log.info("goes on with %d samples from %d tokens of other engines", len(drawn), self._n_moved)
        return drawn

    # --- other engines ------------------------------------------------------------------------------------------------

    def keep(self, keepers: Mapping[int, int]) -> None:
        """The tokens of these groups are kept by other workers, each by its own. Groups that have just been submitted
        and others."""
        assert self._peers is not None
        for group, keeper in keepers.items():
            if not self._peers.sharing.keep(group, keeper) and group in self._groups:
                self._peers.sharing.begin(group, self.samples_of(group), keeper)
                for done in self._groups[group].completions.values():
                    self._end(done)

    def share(self) -> None:
        """Tell them what was drawn since the last time."""
        assert self._peers is not None
        self._peers.sharing.share(self.engine.drawn)

    def _end(self, done: Completion) -> None:
        if self._peers is not None:
            self._peers.sharing.end(
                msgspec.structs.replace(
                    pack(done.id, done.tokens, done.logprobs, done.versions), ended=True, finished=done.finished
                )
            )

    def abort(self, groups: Sequence[int]) -> list[int]:
        """Forget groups, running or queued; returns those that were."""
        ended = [self._groups.pop(group) for group in groups if group in self._groups]
        self._whole = [group for group in self._whole if group in self._groups]
        if ended:
            self.engine.abort([sample for group in ended for sample in group.prompts])
        self.over(groups)
        return [group.id for group in ended]

    def over(self, groups: Sequence[int]) -> None:
        """These are trained, or given up: nobody needs their tokens any more. From any thread."""
        if self._peers is not None:
            self._peers.sharing.over(groups)

    def collect(self, worker: int) -> Generated | None:
        """The groups that what the engine has finished completes, their keys in the store; None for no group."""
        done, self._whole = self._whole, []
        partly: dict[int, _Group] = {}  # not whole, with a sample that has ended now
        for completion in self.engine.take(0.0):
            if completion.id < 0:
                self._beside.append(completion)
                continue
            group = self._groups[group_of(completion.id)]
            group.completions[completion.id] = completion
            self._end(completion)
            partly[group.id] = group
            if len(group.completions) == len(group.prompts):
                done.append(partly.pop(group.id).id)
        if self.ended is not None and partly:
            self._report_ended(self.ended, list(partly.values()))
        if not done:
            return None
        started = max(self._reported, min(self._groups[group].started for group in done))
        groups = [self._groups.pop(group) for group in sorted(done)]
        self._store(groups)
        samples = [group.samples[sample] for group in groups for sample in sorted(group.samples)]
        load = self.engine.status()
        metrics = {
            "running": Mean(float(load.running), 1.0),
            "waiting": Mean(float(load.waiting), 1.0),
            "version": Mean(float(load.version), 1.0),
        }
        if load.free_cache_tokens is not None:
            metrics["free_cache_tokens"] = Mean(float(load.free_cache_tokens), 1.0)
        if self._n_moved:
            metrics["moved_tokens"], self._n_moved = Mean(float(self._n_moved), float(len(samples))), 0
        self._reported = time.time()
        return Generated(
            worker=worker,
            call=self.name,
            groups=tuple(sorted(done)),
            samples=tuple(samples),
            metrics=metrics,
            started=started,
            ended=self._reported,
            drawn=load.drawn_tokens + sum(group.n_tokens for group in self._groups.values()),
        )

    def _report_ended(self, notify: Callable[[Sequence[int]], None], groups: Sequence[_Group]) -> None:
        """Store what has ended of groups that are not whole, and tell of it."""
        new = [sample for group in groups for sample in group.completions.keys() - group.samples.keys()]
        self._store(groups)
        notify(sorted(new))

    def _store(self, groups: Sequence[_Group]) -> None:
        """Put the keys of samples that have ended and are not there yet into the store, key by key for all at once."""
        columns: dict[str, list[Any]] = {key: [] for key in (*GENERATED, *self._texts.own)}
        samples, routes = [], []
        for group in groups:
            for sample, done in sorted(group.completions.items()):
                if sample in group.samples:
                    continue
                prompt = group.prompts[sample]
                n_prompt = len(prompt)
                zeros, unsampled, hidden = [0.0] * n_prompt, [PROMPT_VERSION] * n_prompt, [False] * n_prompt
                counts = done.finished or not self._mask_unfinished
                n_new = len(done.tokens)
                columns[TOKENS].append([*prompt, *done.tokens])
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
                group.samples[sample] = Sample(
                    sample, n_prompt + n_new, n_new, done.finished, oldest, _by_version(done.versions, oldest), lengths
                )
                samples.append(sample)
        ids = [group_of(sample) if self.writes.of_group else sample for sample in samples]
        for key, values in columns.items():
            if key not in GENERATED or key in self.writes.keys:
                self._assembler.put_values(self.writes.keys.get(key, key), ids, values)
        if routes:
            self._assembler.put_tensors(self.writes.keys[ROUTES], ids, routes)

    @staticmethod
    def _cut(own: OwnTokens, group: _Group, text: str, finished: bool) -> list[int]:
        """A sample's text after its prompt in another role's tokens. Raises ValueError naming the group."""
        assert group.asked is not None
        try:
            return own.tokens(group.asked.conversation, text, finished=finished, tools=group.asked.tools)
        except ValueError as error:
            raise ValueError(f"a sample of group {group.id} can't be cut for {own.role!r}: {error}") from error


def _by_version(versions: Sequence[int], oldest: int) -> tuple[int, ...]:
    """Counts of `oldest`, of the next version, and so on."""
    counts = Counter(versions)
    return tuple([counts[version] for version in range(oldest, max(counts, default=oldest) + 1)])
