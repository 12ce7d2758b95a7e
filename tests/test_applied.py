"""The user's own steps and terms: tried before a run starts, and what is said where one fails in it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import Tensor

from realgraph.graphs.errors import ConfigError
from realgraph.graphs.graph import Graph
from realgraph.graphs.maths import ApplyTerm, Loss
from realgraph.runtime.algorithms.applied import AppliedCall, AppliedError, apply_step, apply_term
from realgraph.runtime.algorithms.losses import denominator, evaluate
from realgraph.runtime.algorithms.trial import made_up
from realgraph.runtime.batch import Outputs
from realgraph.runtime.functions.host import FunctionHost
from realgraph.runtime.preflight.applied import try_applied
from realgraph.runtime.preflight.preflight import preflight
from realgraph.runtime.train.microbatch import cut
from realgraph.runtime.worker.failures import failure
from tests.strategies import Tree, change, rl_tree, spec_of
from tests.test_compile import graph_of
from tests.test_preflight import ROWS, make_job, reward

FUNCTIONS = """
import torch

def halved(batch, running):
    return running / 2 if len(running) == batch.n_samples else running[:3]

def per_token(batch, running, factor=1.0):
    return factor * running[batch.sample_index()] * batch.key("values")

def misspelt(batch, running):
    return running * batch.sample_keys["rewrad"]

def wrong_level(batch, running):
    return running * batch.sample_keys["values"].sum()

def short(batch, running):
    return running[:-1]

def nothing(batch, second):
    pass

def infinite(batch, running):
    return running / 0

def broken(batch, second):
    return helper(batch)

def helper(batch):
    return torch.zeros(3) @ torch.zeros(4)

def square(batch, outputs, scale=1.0):
    return scale * outputs.logprobs ** 2 * batch.key("reward")

def entropy(batch, outputs):
    return outputs.entropy

def integers(batch, outputs):
    return batch.tokens

def constant(batch, outputs):
    return batch.mask.float()

def changes(batch, outputs):
    batch.mask[:] = False
    return outputs.logprobs

async def later(batch, outputs):
    return outputs.logprobs

def no_number(batch, outputs):
    return outputs.logprobs.log()

def no_slope(batch, outputs):
    return torch.where(batch.mask, outputs.logprobs, (0 * outputs.logprobs).sqrt())

def in_place(batch, outputs):
    squared = outputs.logprobs.exp()
    loss = squared * squared
    squared += 1
    return loss

def endless(batch, outputs):
    while True:
        pass
"""


def graph_with(steps: Tree, terms: Tree) -> Graph:
    """The RL tree with these advantage steps before its own, and these terms beside its own."""
    tree = rl_tree()
    own = {name: {"kind": "apply", **entry} for name, entry in steps.items()}
    tree["calls"]["advantage"]["steps"] = {**own, **tree["calls"]["advantage"]["steps"]}
    for name, entry in terms.items():
        tree = change(tree, {f"calls.train.loss.terms.{name}": {"kind": "apply", **entry}})
    spec_of(tree)
    return graph_of(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions")
    (path / "mine.py").write_text(FUNCTIONS)
    (path / "raises.py").write_text("import os\n\nos.environ['NOT_THERE']\n")
    return path


@pytest.fixture(scope="module")
def host(folder: Path) -> Any:
    with FunctionHost(str(folder)) as one:
        yield one


def test_functions_that_work_are_called_once(host: FunctionHost, folder: Path) -> None:
    steps = {"half": {"fn": "mine:halved"}, "tokens": {"fn": "mine:per_token", "reads": ["values"]}}
    terms = {"more": {"fn": "mine:square", "reads": ["reward"]}, "still": {"fn": "mine:constant"}}
    assert try_applied(graph_with(steps, terms), host, str(folder)) == [
        "advantage.half: mine:halved: called on a made-up batch",
        "advantage.tokens: mine:per_token: called on a made-up batch",
        "train.more: mine:square: called on a made-up batch",
        "train.still: mine:constant: its loss does not depend on the model's outputs: "
        "it has no gradient and trains nothing",
    ]
    for fn, said in (("no_number", "its loss is nan"), ("no_slope", "its gradient is not finite")):
        (line,) = try_applied(graph_with({}, {"own": {"fn": f"mine:{fn}"}}), host, str(folder))
        assert f"train.own: mine:{fn}: on made-up numbers {said}" in line
    (line,) = try_applied(graph_with({"own": {"fn": "mine:infinite"}}, {}), host, str(folder))
    assert "on made-up numbers the advantage of sample 0 is not finite" in line


STEP_MISTAKES = {
    "misspelt": "looks up the key 'rewrad', which `reads` does not declare (declared: reward) (mine.py:11)",
    "per_token": "looks up the key 'values', which `reads` does not declare (declared: reward) (mine.py:8)",
    "short": "returned the shape (7,), expected (8,), one a sample or (36,), one a token",
    "nothing": "returned None; expected a tensor",
    "broken": "raised RuntimeError: inconsistent tensor size",
}
TERM_MISTAKES = {
    "square": "looks up the key 'reward', which `reads` does not declare (declared: none) (mine.py:32)",
    "entropy": "uses outputs.entropy, which `reads` does not declare (declared: logprobs) (mine.py:35)",
    "integers": "returned torch.int64; a loss is a floating-point number per token",
    "nothing": "returned None; expected a tensor",
    "later": "is async, and a step or term is a plain function",
    "in_place": "can't be differentiated: one of the variables needed for gradient computation has been modified",
}


def test_all_functions_that_fail_are_named_with_their_place(host: FunctionHost, folder: Path) -> None:
    for name, text in STEP_MISTAKES.items():
        with pytest.raises(ConfigError) as caught:
            try_applied(graph_with({"own": {"fn": f"mine:{name}"}}, {}), host, str(folder))
        (problem,) = caught.value.problems
        assert problem.where.path == "$.calls.advantage.steps.own.fn"
        assert problem.text.startswith(f"step 'own': mine:{name} {text}"), problem.text
        assert "it is called as (batch, running)" in problem.hint
    for name, text in TERM_MISTAKES.items():
        step = {"own": {"fn": "mine:short"}}  # the mistakes of other calls are told as well
        with pytest.raises(ConfigError) as caught:
            try_applied(graph_with(step, {"own": {"fn": f"mine:{name}"}}), host, str(folder))
        first, second = caught.value.problems
        assert (first.where.path, second.where.path) == (
            "$.calls.advantage.steps.own.fn",
            "$.calls.train.loss.terms.own.fn",
        )
        assert second.text.startswith(f"term 'own': mine:{name} {text}"), second.text
        assert "outputs: logprobs" in second.hint
    with pytest.raises(ConfigError, match=r"broken raised RuntimeError: .* \(mine.py:29\)"):
        try_applied(graph_with({"own": {"fn": "mine:broken"}}, {}), host, str(folder))


def test_a_function_that_changes_the_batch_is_refused(host: FunctionHost, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'own': mine:changes changes batch\.mask in place"):
        try_applied(graph_with({}, {"own": {"fn": "mine:changes"}}), host, str(folder))


def test_a_module_that_raises_on_import_names_its_own_line(host: FunctionHost, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        try_applied(graph_with({}, {"own": {"fn": "raises:term"}}), host, str(folder))
    assert "can't load 'raises:term': KeyError: 'NOT_THERE' (raises.py:3)" in caught.value.problems[0].text
    with pytest.raises(ConfigError) as caught:
        try_applied(graph_with({}, {"own": {"fn": "absent:term"}}), host, str(folder))
    assert caught.value.problems[0].text == "can't load 'absent:term': ModuleNotFoundError: No module named 'absent'"


def test_an_endless_function_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realgraph.runtime.preflight.applied.TRIAL_SECONDS", 0.5)
    with FunctionHost(str(folder)) as own, pytest.raises(ConfigError) as caught:
        try_applied(graph_with({}, {"own": {"fn": "mine:endless"}}), own, str(folder))
    assert caught.value.problems[0].text == "mine:endless took more than 0.5 s"


def test_the_look_at_the_first_rows_tries_them_too(tmp_path: Path) -> None:
    (tmp_path / "mine_too.py").write_text(FUNCTIONS + "\ndef score(text, answer, values):\n    return sum(values)\n")
    calls = {
        "reward": reward("mine_too:score", reads=["text", "answer", "values"]),
        "values": {"kind": "inference", "model": "actor", "output": "logprobs", "writes": ["values"]},
        "advantage": {"kind": "advantage", "steps": {"own": {"kind": "apply", "fn": "mine_too:misspelt"}}},
    }
    job = make_job(tmp_path, calls, ROWS)
    with pytest.raises(ConfigError) as caught:
        preflight(job)
    assert caught.value.problems[0].where.path == "$.calls.advantage.steps.own.fn"
    right = change(calls, {"advantage.steps.own.fn": "mine_too:halved"})
    lines = preflight(make_job(tmp_path, right, ROWS))
    assert any("reward: mine_too:score: reward " in line for line in lines)  # what inference writes was made up
    assert lines[-1] == "advantage.own: mine_too:halved: called on a made-up batch"


# --- in the run -------------------------------------------------------------------------------------------------------


def test_a_failure_in_the_run_names_entry_function_and_line() -> None:
    batch = made_up({}, (2, 2))

    def raises(batch: Any, running: Tensor) -> Tensor:
        raise KeyError("reward")

    call = AppliedCall("step 'own'", "mine:raises", raises, (), {})
    with pytest.raises(
        AppliedError, match=r"^step 'own': mine:raises raised KeyError: 'reward' \(test_applied.py:\d+\)$"
    ) as caught:
        apply_step(call, batch, torch.zeros(batch.n_samples))
    failed = failure(1, "advantage", caught.value)
    assert (failed.kind, failed.call, failed.worker) == ("function", "advantage", 1)
    assert "KeyError: 'reward'" in failed.detail


def test_a_step_takes_no_gradient_along() -> None:
    batch = made_up({}, (2, 2))
    call = AppliedCall("step 'own'", "mine:scaled", lambda batch, running: torch.nn.Parameter(running) * 2, (), {})
    assert not apply_step(call, batch, torch.ones(batch.n_samples)).requires_grad


def test_a_term_over_groups_gets_them_whole() -> None:
    sizes = {}
    for over in ("sample", "group"):
        loss = Loss({"own": ApplyTerm("m:f", over=over)})
        cuts = cut(made_up({}, (4, 3)), 9, loss.needs_whole_groups)
        sizes[over] = {sorted(part) in ([0, 1, 2, 3], [4, 5, 6]) for part in cuts}
    assert sizes == {"sample": {False}, "group": {True}}


def test_keys_and_outputs_that_are_declared_are_all_there() -> None:
    keys = {name: key.type for name, key in graph_of(rl_tree()).keys.items()}
    batch = made_up(keys, (4, 2))
    outputs = Outputs(logprobs=torch.rand(batch.n_tokens), entropy=torch.rand(batch.n_tokens))
    seen: list[Any] = []

    def spy(batch: Any, outputs: Any) -> Tensor:
        seen.append((set(batch.token_keys), set(batch.sample_keys), getattr(outputs, "entropy", None)))
        return outputs.logprobs

    call = AppliedCall("term 'spy'", "m:spy", spy, ("reward", "values"), {})
    assert torch.equal(apply_term(call, batch, outputs, ("logprobs",)), outputs.logprobs)  # type: ignore[arg-type]
    assert seen == [({"values"}, {"reward"}, None)]
    loss = Loss({"spy": ApplyTerm("m:spy", ("entropy", "logprobs"))})
    evaluate(loss, batch, outputs, denominator(loss, batch), {"m:spy": spy})
    assert outputs.entropy is not None
    assert seen[-1][:2] == (set(), set()) and torch.equal(seen[-1][2], outputs.entropy)
