"""Evaluations: which functions can score held-out samples, and by which of their numbers samples are judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from realgraph.commands.eval import evaluation_of
from realgraph.graphs.functions import judging_keys
from realgraph.graphs.spec import Advantage, Function, ModelCall
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.search.search import Infeasible
from realgraph.run.running import prepare, prepare_checked
from realgraph.run_file.compose import check_run
from tests.run_texts import RUN, place, refused
from tests.runs import GRPO, finish, home, records, write_run

__all__ = ["home", "place"]

EVAL = "eval: {every: 2, data: {path: data/train.jsonl}}\n"
SCORES = """
def score(text: str, answer: str, strict: bool) -> float:
    return 0.0

def size(text: str) -> float:
    return 1.0

def total(size: float) -> float:
    return size

def ranked(size: list[float]) -> list[float]:
    return size

def seen(tokens: list[int]) -> float:
    return 1.0

def words(text: str) -> str:
    return text
"""
SIZE = "calls.size={kind: function, fn: 'my_rewards:size', reads: [text], writes: {size: sample float32}}"
ODD = """
def odd(answer: str) -> float:
    if answer.endswith("2"):
        raise ValueError("no score, which is the score of an even number")
    return float(int(answer) % 2)

def score(text: str, odd: float) -> dict:
    return {"note": text, "keep": True, "length": 1.0, "reward": odd}
"""


@pytest.mark.parametrize(
    ("overrides", "path", "text", "hint"),
    [
        (
            ["calls.reward={fn: 'my_rewards:ranked', over: group, reads: [size], args: null}", SIZE],
            "$.eval.call",
            "'reward' works over a group",
            "name a call that can: size",
        ),
        (
            ["calls.reward={fn: 'my_rewards:seen', reads: [tokens], args: null}"],
            "$.eval.call",
            "'reward' reads 'tokens', but an evaluation has answer, finished, prompt, text alone",
            "leave eval out, or add a function that can",
        ),
        (
            [
                "calls.words={kind: function, fn: 'my_rewards:words', reads: [text], writes: {words: sample text}}",
                "eval.call=words",
            ],
            "$.eval.call",
            "'words' writes no number a sample",
            "name a call that can: reward",
        ),
        (["eval.key=rewards"], "$.eval.key", "'reward' writes no number 'rewards'", "did you mean 'reward'?"),
        (["eval.call=advantage"], "$.eval.call", "'advantage' is no function and no inference", "can: reward"),
    ],
)
def test_what_can_not_score_is_refused_before_a_run(
    place: Path, overrides: list[str], path: str, text: str, hint: str
) -> None:
    (place / "my_rewards.py").write_text(SCORES)
    (place / "run.yaml").write_text(RUN + EVAL)
    (problem,) = [one for one in refused(place, *overrides) if one.where.path.startswith("$.eval")]
    assert problem.where.path == path
    assert text in problem.text and hint in problem.hint


def test_a_function_that_is_switched_off_scores_nothing(place: Path) -> None:
    (place / "run.yaml").write_text(
        RUN.replace("graph: grpo", "graph: ppo")
        .replace("group_size: 2", "reward_fn: ''\n  reward_model: model")
        .replace("lr: 2e-6", "actor_lr: 2e-6")
        .replace("calls:\n", "")
        .replace('  reward: {fn: "my_rewards:score", args: {strict: true}}\n', "")
        + EVAL
    )
    (problem,) = [one for one in refused(place, "eval.call=reward") if one.where.path.startswith("$.eval")]
    assert "'reward' is no call of the graph" in problem.text and "score" in problem.hint


def test_a_graph_that_neither_generates_nor_trains_is_not_evaluated(place: Path) -> None:
    (place / "data" / "train.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 10)
    run = "graph: sft\nmodels: {actor: {path: model}}\ndata: {path: data/train.jsonl}\nbatch: {groups: 4}\n"
    (place / "run.yaml").write_text(run + EVAL)
    check_run(place / "run.yaml", ())
    judge = "{kind: inference, model: actor, output: logprobs, writes: [logp]}"
    problems = refused(place, "calls.train.when=false", f"calls.judge={judge}")
    (problem,) = [one for one in problems if one.where.path.startswith("$.eval")]
    assert (problem.where.path, problem.hint) == ("$.eval", "leave eval out")


def test_functions_that_read_of_each_other_can_score(place: Path) -> None:
    (place / "my_rewards.py").write_text(SCORES)
    (place / "run.yaml").write_text(RUN + EVAL)
    check_run(place / "run.yaml", [SIZE, "calls.reward={fn: 'my_rewards:total', reads: [size], args: null}"])


def test_the_reward_judges_and_else_the_first_number_that_is_no_filter() -> None:
    types = {"why": "sample text", "keep": "sample bool", "form": "sample float32", "right": "sample float32"}
    score = Function(fn="m:score", writes={"all": "token float32", "group": "group float32", **types})
    calls: dict[str, ModelCall] = {"score": score}
    assert judging_keys(calls, "score") == ("form", "right")
    assert judging_keys({**calls, "advantage": Advantage(steps={}, reads=("right",))}, "score") == ("right", "form")
    assert judging_keys({"score": Function(fn="m:score", writes={"keep": "sample bool"})}, "score") == ()
    assert judging_keys(calls, "nothing") == ()


def long_rows(home: Path, which: str) -> float:
    """Held-out rows of which every second one, or each, has a prompt that is too long. Returns their share."""
    rows = [json.loads(line) for line in (home / "test.jsonl").read_text().splitlines()][:6]
    longer = rows if which == "all" else rows[1::2]
    for row in longer:
        row["prompt"] = "1+1+" + row["prompt"]
    (home / f"long_{which}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(longer) / len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["half", "all"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_rows_that_are_too_long_are_left_out_and_counted(home: Path, which: str, staleness: int) -> None:
    """Also where one of two workers, or both, have no other rows, and the run goes on meanwhile."""
    share, name = long_rows(home, which), f"long-{which}-{staleness}"
    own: dict[str, Any] = {
        "calls": {"reward": {"fn": "rewards:score"}},
        "eval": {"every": 2, "data": {"path": f"long_{which}.jsonl"}},
        "steps": 2,
    }
    beside: dict[str, Any] = {
        "cluster": {"devices": 3},
        "allocation": {"rollout": {"first": 0, "devices": 2, "dp": 2}, "train": {"first": 2, "devices": 1}},
        "staleness": 1,
        "eval": {"on": "interleaved"},
    }
    finish(home, "run", str(write_run(home, name, GRPO, own, beside if staleness else {})), name=name)
    first, last = records(home / name, "eval")
    assert first["metrics"]["skipped"] == last["metrics"]["skipped"] == share
    assert ("accuracy" in last["metrics"]) == (which == "half")
    assert last["best"] <= (which == "half")


def test_samples_of_a_run_are_judged_by_their_reward(home: Path) -> None:
    """It is the last of what the function writes, and reads what another one wrote."""
    (home / "parity.py").write_text(ODD)
    writes = {name: f"sample {dtype}" for name, dtype in (("note", "text"), ("keep", "bool"), ("length", "float32"))}
    own: dict[str, Any] = {
        "cluster": {"devices": 1},
        "calls": {
            "odd": {
                "kind": "function",
                "fn": "parity:odd",
                "reads": ["answer"],
                "writes": {"odd": "sample float32"},
                "on_error": "score",
            },
            "reward": {
                "fn": "parity:score",
                "reads": ["text", "odd"],
                "writes": {**writes, "reward": "sample float32"},
            },
        },
        "eval": {"every": 1, "at_start": False, "data": {"path": "test.jsonl"}},
        "steps": 1,
    }
    finish(home, "run", str(write_run(home, "judged", GRPO, own)), name="judged")
    (record,) = records(home / "judged", "eval")
    answers = [int(json.loads(line)["answer"]) for line in (home / "test.jsonl").read_text().splitlines()]
    share = sum(answer % 2 for answer in answers) / len(answers)
    assert record["metrics"]["accuracy"] == record["metrics"]["reward"] == pytest.approx(share)
    assert record["metrics"]["failed"] == pytest.approx(sum(answer % 10 == 2 for answer in answers) / len(answers))


def test_constraints_on_calls_that_an_evaluation_leaves_out_bind_nothing(home: Path) -> None:
    own: dict[str, Any] = {
        "params": {"kl_coef": 0.1},
        "constraints": {"share": [["rollout", "train"], ["train", "ref_logp"]], "forbid": {"train": [{"tp": 2}]}},
        "allocation": {"train": {"dp": 2}},
        "eval": {"data": {"path": "test.jsonl"}},
    }
    checked = evaluation_of(check_run(write_run(home, "bound", GRPO, own), ()))
    assert {*prepare_checked(checked).job.plan.allocations} == {"rollout"}
    assert checked.run.constraints == Constraints()


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_alone_has_room_where_training_has_none(home: Path, staleness: int) -> None:
    """Its plan has the calls that make samples and score them, and no others."""
    tight = {"constraints": {"memory_gb": 0.0005}, "staleness": staleness, "eval": {"data": {"path": "test.jsonl"}}}
    file = write_run(home, f"tight-{staleness}", GRPO, tight)
    with pytest.raises(Infeasible):
        prepare(file, (), None)
    job = prepare_checked(evaluation_of(check_run(file, ()))).job
    assert {*job.graph.calls} >= {"rollout", "reward"} and "train" not in job.graph.calls
    assert {*job.plan.allocations} == {"rollout"} and job.plan.staleness == 0
