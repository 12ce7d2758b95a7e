"""Settings of a run file that nothing reads, and packages that are missing: warned of at their places."""

from pathlib import Path

import pytest

from realgraph.run_file import run_warnings
from realgraph.run_file.compose import check_run
from realgraph.run_file.resolved import resolved_text
from tests.run_texts import place, refused

__all__ = ["place"]

GREEDY = "calls.greedy={kind: generate, model: actor, temperature: 0}"
SEVERAL = [GREEDY, "calls.reward.reads={text: rollout.text, answer: answer}", "calls.train.samples=rollout"]
LOSSES = ["rollout.min_engines=2", "rollout.replacements=1"]
SFT = ["graph=sft", "calls=null", "data.columns={prompt: question, response: answer}", "params=null"]
RATED = [
    "models.rm={path: model, head: score}",
    "calls.rated={kind: inference, model: rm, output: scores, writes: [it]}",
]
HOSTS = "launch={kind: hosts, listen: '127.0.0.1:7000', interface: "
CASES: dict[str, tuple[list[str], list[str]]] = {
    "nothing": (["staleness=1", "overdue=drop", "rollout.interrupt=wait", *LOSSES], []),
    "engines may be lost": (["staleness=1", *LOSSES], []),
    "several calls generate": (
        [*SEVERAL, "staleness=1", *LOSSES],
        ["$.rollout.min_engines", "$.rollout.replacements"],
    ),
    "defaults of them": ([*SEVERAL, "staleness=1", "rollout.min_engines=1"], []),
    "a synchronous run": (
        [*LOSSES, "rollout.interrupt=wait", "overdue=drop"],
        ["$.overdue", "$.rollout.interrupt", "$.rollout.min_engines", "$.rollout.replacements"],
    ),
    "a call that is off": (["allocation.ref_logp.dp=1"], ["$.allocation.ref_logp"]),
    "a call that is on": (["allocation.ref_logp.dp=1", "params.kl_coef=0.1"], []),
    "local files": (["data.subset=main", "models.actor.revision=main"], ["$.data.subset", "$.models.actor.revision"]),
    "a project of no tracker": (["outputs.project=mine"], ["$.outputs.project"]),
    "no generation": (
        [*SFT, "rollout.max_running=8", "data.truncated=mask", "outputs.transcripts=9", "runtime.function_processes=2"],
        ["$.data.truncated", "$.outputs.transcripts", "$.rollout.max_running", "$.runtime.function_processes"],
    ),
    "a penalty of what is cut": (
        ["data.truncated=mask", "calls.advantage.steps={overlong: {start: 2, limit: 4}, center: {}}"],
        ["$.data.truncated"],
    ),
    "samples that are cut": (["data.truncated=mask"], []),
    "an evaluation by the loss": (
        [*SFT, "eval={every: 2, n: 2, k: [1, 2], call: score, data: {path: openai/gsm8k}}"],
        ["$.eval.call", "$.eval.k", "$.eval.n"],
    ),
    "scores of which none is right": (
        [*RATED, "eval={every: 2, n: 2, temperature: 1, k: [1, 2], call: rated, data: {path: openai/gsm8k}}"],
        ["$.eval.k"],
    ),
    "weights that nobody gets": (
        [*SFT, "runtime.verify_weights=1", "runtime.max_logprob_gap=0.1"],
        ["$.runtime.max_logprob_gap", "$.runtime.verify_weights"],
    ),
    "an interface that this host lacks": ([HOSTS + "nope}"], ["$.launch.interface"]),
    "an interface of this host": ([HOSTS + "lo}"], []),
    "weights that engines get": (["runtime.verify_weights=1", "runtime.max_logprob_gap=0.1"], []),
}


@pytest.mark.parametrize("case", CASES)
def test_a_setting_that_nothing_reads_is_named_at_its_place(place: Path, case: str) -> None:
    overrides, paths = CASES[case]
    found = check_run(place / "run.yaml", overrides).warnings
    assert [warning.where.path for warning in found] == paths
    assert all(warning.rule == "without_effect" and warning.where.file == "command line" for warning in found)
    assert all(warning.text and warning.hint for warning in found)


def test_a_parameter_that_a_call_of_the_run_file_replaces_is_named(place: Path) -> None:
    assert check_run(place / "run.yaml", ["calls.train.lr=2e-6"]).warnings == ()
    (warning,) = check_run(place / "run.yaml", ["calls.train.lr=2e-6", "params.lr=1e-5"]).warnings
    assert (warning.where.file, warning.where.path) == ("command line", "$.params.lr")
    assert warning.text == "nothing follows it: calls.train.lr is 2e-06 (command line), in the place of ${params.lr}"
    assert check_run(place / "run.yaml", ["calls.train.lr=1e-5", "params.lr=1e-5"]).warnings == ()


def test_a_parameter_whose_place_is_gone_is_named(place: Path) -> None:
    clip = "calls.train.loss.terms.policy.clip={kind: none}"
    assert check_run(place / "run.yaml", [clip]).warnings == ()
    (warning,) = check_run(place / "run.yaml", [clip, "params.clip_low=0.1"]).warnings
    assert (warning.where.path, warning.rule) == ("$.params.clip_low", "without_effect")
    assert "calls.train.loss.terms.policy.clip.low, which refers to it in the graph, is left out" in warning.text


def test_parameters_of_a_resolved_run_file_are_no_way_to_change_it(place: Path) -> None:
    """There the values stand in the calls: to run it again is no mistake, to change its parameters is."""
    file = place / "config.yaml"
    file.write_text(resolved_text(check_run(place / "run.yaml", ["params.lr=1e-5"]).composed))
    assert check_run(file).warnings == ()
    (warning,) = check_run(file, ["params.lr=3e-5"]).warnings
    assert warning.where.path == "$.params.lr" and "calls.train.lr is 1e-05" in warning.text


def test_defaults_of_a_resolved_run_file_are_no_mistake_until_they_are_asked_for(place: Path) -> None:
    file = place / "config.yaml"
    file.write_text(resolved_text(check_run(place / "run.yaml", ["calls.train.minibatches=2"]).composed))
    assert check_run(file).warnings == ()
    (warning,) = check_run(file, ["params.minibatches=1"]).warnings
    assert warning.where.path == "$.params.minibatches" and "calls.train.minibatches is 2" in warning.text


def test_trackers_that_are_not_installed_are_named_with_what_installs_them(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["outputs.trackers=[wandb]", "outputs.tensorboard=true"]
    monkeypatch.setattr(run_warnings, "find_spec", lambda name: None)
    found = check_run(place / "run.yaml", asked).warnings
    assert [(warning.where.path, warning.hint) for warning in found] == [
        ("$.outputs.tensorboard", "pip install tensorboard"),
        ("$.outputs.trackers", "pip install wandb"),
    ]
    monkeypatch.undo()
    (tmp_path / "wandb").mkdir()  # a tracker's own files, which are no package
    monkeypatch.syspath_prepend(tmp_path)
    assert [warning.hint for warning in check_run(place / "run.yaml", asked[:1]).warnings] == ["pip install wandb"]
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    assert check_run(place / "run.yaml", asked[:1]).warnings == ()


def test_held_out_data_are_not_trained_on(place: Path) -> None:
    held_out = "eval: {every: 2, data: {path: data/train.jsonl, truncated: mask}}\n"
    (place / "run.yaml").write_text((place / "run.yaml").read_text() + held_out)
    (warning,) = check_run(place / "run.yaml").warnings
    assert warning.where.path == "$.eval.data.truncated" and warning.where.line > 0


def test_an_evaluation_without_a_function_that_scores_is_one_mistake(place: Path) -> None:
    judge = "calls={train: {when: false}, judge: {kind: inference, model: actor, output: logprobs, writes: [logp]}}"
    sft = [override for override in SFT if override != "calls=null"]
    (problem,) = [one for one in refused(place, *sft, judge, "eval={every: 2}") if one.where.path == "$.eval"]
    assert problem.where.path == "$.eval" and problem.hint.startswith("leave eval out")
