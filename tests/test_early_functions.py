"""Functions of samples whose groups are not whole: they run beside generation, once, after all that is waited for."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")

import msgspec

from realgraph.graphs.spec import Function
from realgraph.runtime.data.stops import Stops
from realgraph.runtime.engine import Completion, EngineStatus
from realgraph.runtime.functions.functions import Unit
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.generate.rollouts import Rollouts, Sampling, Texts, Writes
from realgraph.runtime.job.sample_ids import sample_ids
from realgraph.runtime.store.assemble import Assembler
from realgraph.runtime.store.inputs import Inputs
from realgraph.runtime.store.store import Store
from realgraph.runtime.store.transfer import DataPlane
from realgraph.runtime.wire.curve import make_keys
from realgraph.runtime.wire.protocol import Done, Execute, SampleSource
from realgraph.runtime.worker.function_calls import FunctionCalls, FunctionFailed, PromptTexts
from tests.shapes import Shape, graph_of, job_of

LOGGED = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def score(text, answer=""):
    with open(HERE / "log", "a") as log:
        print(text, file=log)
    while text.startswith("wait") and not (HERE / "go").exists():
        time.sleep(0.01)
    if text == "raise":
        raise KeyError(text)
    return len(text)
"""
SCORE = Function("scored:score", ("text",), {"reward": "sample float32"}, timeout_seconds=20.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scored.py").write_text(LOGGED)
    return tmp_path


@pytest.fixture
def host(folder: Path) -> Iterator[FunctionHost]:
    with FunctionHost(str(folder)) as own:
        yield own


def unit(sample: int, text: str) -> Unit:
    return Unit((sample,), {"text": text})


def logged(folder: Path) -> list[str]:
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


def until_logged(folder: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while text not in logged(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_has_run_early_does_not_run_again(host: FunctionHost, folder: Path) -> None:
    (early,) = host.begin(SCORE, [unit(1, "four")])
    until_logged(folder, "four")
    results = host.run("reward", SCORE, [unit(0, "a"), early.unit, unit(2, "bc")], early={1: early})
    assert [result.values["reward"] for result in results] == [1.0, 4.0, 2.0]
    assert sorted(logged(folder)) == ["a", "bc", "four"]


def test_what_is_waited_for_goes_before_what_is_early(host: FunctionHost, folder: Path) -> None:
    begun = host.begin(SCORE, [unit(0, "wait0"), unit(1, "early1"), unit(2, "early2"), unit(3, "dropped")])
    until_logged(folder, "wait0")
    begun[3].drop()
    early = {0: begun[0], 2: begun[2]}
    (folder / "go").touch()
    results = host.run("reward", SCORE, [begun[0].unit, unit(4, "now"), begun[2].unit], early=early)
    assert [result.values["reward"] for result in results] == [5.0, 3.0, 6.0]
    until_logged(folder, "early1")  # with nothing else to do
    host.run("reward", SCORE, [unit(5, "last")])
    assert logged(folder)[0] == "wait0"
    assert "dropped" not in logged(folder)


def test_an_error_of_early_work_is_that_of_its_sample(host: FunctionHost, folder: Path) -> None:
    (early,) = host.begin(SCORE, [unit(7, "raise")])
    until_logged(folder, "raise")
    (result,) = host.run("reward", SCORE, [early.unit], early={0: early})
    assert "scored:score on sample 7: KeyError: 'raise'" in result.error
    assert logged(folder) == ["raise"]


def test_early_work_ends_with_the_host(folder: Path) -> None:
    host = FunctionHost(str(folder))
    (early,) = host.begin(SCORE, [unit(0, "wait")])
    until_logged(folder, "wait")
    host.close()
    outcomes: list[str] = []
    early.give(lambda outcome: outcomes.append(outcome.kind), lambda: True)
    assert outcomes == ["skipped"]


class Given:
    """An engine that finishes the samples that it is told to."""

    version = 0

    def __init__(self) -> None:
        self.finished: list[Completion] = []

    def submit(self, requests: Sequence[Any]) -> None:
        pass

    def abort(self, ids: Sequence[int]) -> None:
        pass

    def take(self, timeout: float) -> list[Completion]:
        done, self.finished = self.finished, []
        return done

    def status(self) -> EngineStatus:
        return EngineStatus(running=0, waiting=0, version=0)

    def finish(self, sample: int, *tokens: int) -> None:
        n = len(tokens)
        self.finished.append(Completion(sample, tokens, (-1.0,) * n, (0,) * n, True))


class Generating:
    """A worker that generates groups of three samples, without a process; texts are letters, one a token."""

    def __init__(self, folder: Path) -> None:
        shape = Shape(n=3)
        graph = graph_of(shape)
        reward = msgspec.structs.replace(SCORE, reads=("text", "answer"))
        self.graph = msgspec.structs.replace(graph, calls={**graph.calls, "reward": reward})
        self.store = Store(1 << 16)
        self.plane = DataPlane(0, self.store, make_keys(), "127.0.0.1")
        assembler = Assembler(self.graph, self.store, self.plane, 10.0)
        self.host, self.engine = FunctionHost(str(folder)), Given()
        inputs = Inputs(assembler, lambda call, task: None)
        job = job_of(shape, graph=self.graph)
        self.functions = FunctionCalls(job, assembler, inputs, self.host, 0, PromptTexts(str, str))
        texts, writes = (
            Texts(lambda tokens: "".join(chr(96 + token) for token in tokens)),
            Writes.of(self.graph, "rollout"),
        )
        sampling = Sampling(3, 9, 1.0, 1.0, 0, Stops(frozenset()))
        self.rollouts = Rollouts("rollout", self.engine, sampling, "prompt", assembler, texts, writes)  # type: ignore[arg-type]
        self.rollouts.ended = self.functions.begin
        self.assembler = assembler

    def submit(self, group: int) -> list[int]:
        self.assembler.put_values("prompt", [group], [[1, 2]])
        self.assembler.put_values("answer", [group], ["7"])
        self.rollouts.submit({group: (1, 2)}, seed=3)
        return list(sample_ids(group, 3))

    def score(self, samples: Sequence[int]) -> Done:
        source = SampleSource(0, self.graph.reads["reward"], tuple(samples))
        return self.functions.run(Execute(1, "reward", 0, tuple((one,) for one in samples), (source,)))

    def close(self) -> None:
        self.host.close()
        self.plane.close()
        self.store.close()


@pytest.fixture
def generating(folder: Path) -> Iterator[Generating]:
    worker = Generating(folder)
    yield worker
    worker.close()


def test_a_sample_is_scored_when_it_ends_and_not_when_its_group_does(generating: Generating, folder: Path) -> None:
    first, second, third = generating.submit(5)
    generating.engine.finish(second, 1, 2)
    assert generating.rollouts.collect(0) is None
    until_logged(folder, "ab")
    generating.engine.finish(first, 3)
    generating.engine.finish(third, 4, 4, 4)
    made = generating.rollouts.collect(0)
    assert made is not None
    assert made.groups == (5,)
    assert [(one.sample, one.n_new_tokens) for one in made.samples] == [(first, 1), (second, 2), (third, 3)]
    done = generating.score([first, second, third])
    assert done.by_group[5]["reward"].value == 2.0
    assert [generating.store.get("reward", sample).item() for sample in (first, second, third)] == [1.0, 2.0, 3.0]
    assert logged(folder)[0] == "ab"
    assert sorted(logged(folder)) == ["ab", "c", "ddd"]  # each once


def test_samples_of_a_group_that_is_given_up_leave_nothing(generating: Generating, folder: Path) -> None:
    first, second, third = generating.submit(5)
    generating.engine.finish(first, 1)
    generating.rollouts.collect(0)
    until_logged(folder, "a")
    assert generating.rollouts.abort([5]) == [5]
    generating.assembler.drop([5])
    generating.functions.forget([5])
    assert not any(generating.store.has(key, id) for key in generating.graph.keys for id in (5, first, second, third))
    again = generating.submit(5)
    for sample in again:
        generating.engine.finish(sample, 2, 2)
    assert generating.rollouts.collect(0) is not None
    assert generating.score(again).by_group[5]["reward"].value == 2.0  # not 1 of what was given up


def test_an_early_error_ends_the_run_when_the_group_is_whole(generating: Generating, folder: Path) -> None:
    samples = generating.submit(5)
    generating.engine.finish(samples[0], *(ord(letter) - 96 for letter in "raise"))
    generating.rollouts.collect(0)
    until_logged(folder, "raise")
    for sample in samples[1:]:
        generating.engine.finish(sample, 1)
    generating.rollouts.collect(0)
    with pytest.raises(FunctionFailed, match=f"on sample {samples[0]}: KeyError"):
        generating.score(samples)


@pytest.mark.parametrize(
    ("reads", "over", "early"),
    [
        (("text", "answer"), "sample", True),
        (("text",), "group", False),
        (("text", "reward"), "sample", False),  # another function's, which may run over the group
    ],
)
def test_functions_of_one_ended_sample_are_known_by_what_they_read(
    reads: tuple[str, ...], over: Literal["sample", "group"], early: bool
) -> None:
    graph = graph_of(Shape(n=3, two_stage=True))
    bonus = Function("scored:score", over=over)
    graph = msgspec.structs.replace(graph, calls={**graph.calls, "bonus": bonus}, reads={**graph.reads, "bonus": reads})
    assert ("bonus" in graph.sample_functions) is early
