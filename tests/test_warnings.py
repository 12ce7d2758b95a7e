"""Warnings of what is allowed and does not do what it seems to: once, with place and reason, by check, plan and run."""

import json
from pathlib import Path
from typing import Any

import pytest

from realgraph.commands.check import check_command
from realgraph.graphs.check.warnings import WARNINGS, warnings_of
from realgraph.graphs.yaml.document import parse_document, read_document
from realgraph.graphs.yaml.library import library_folder, library_names
from realgraph.run_file.compose import check_run
from realgraph.run_file.open_graph import graph_and_warnings
from tests.run_texts import place
from tests.strategies import change, dpo_tree, online_dpo_tree, rl_tree, spec_of, where

__all__ = ["place"]

POLICY = "calls.train.loss.terms.policy"
KL = "calls.train.loss.terms.kl"
NO_RATIO = {f"{POLICY}.ratio": "none", f"{POLICY}.off_policy": {"kind": "ignore"}}
CLIP = {f"{POLICY}.clip": {"kind": "two_sided"}}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "k1": ({f"{KL}.estimator": "k1"}, ["kl_without_gradient"]),
    "k1 of no weight": ({f"{KL}.estimator": "k1", f"{KL}.coef": 0.0}, []),
    "k2": ({f"{KL}.estimator": "k2"}, []),
    "no ratio": (NO_RATIO, []),
    "no ratio, epochs": ({**NO_RATIO, "calls.train.epochs": 2}, ["several_steps_without_ratio"]),
    "no ratio, minibatches": ({**NO_RATIO, "calls.train.minibatches": 4}, ["several_steps_without_ratio"]),
    "a ratio, epochs": ({"calls.train.epochs": 2}, []),
    "no ratio, a clip": ({**NO_RATIO, **CLIP}, ["clip_without_ratio"]),
    "no ratio, no clip": ({**NO_RATIO, f"{POLICY}.clip": {"kind": "none"}}, []),
    "a clip": (CLIP, []),
    "a spare model": ({"models.spare": {"init": "actor"}}, ["unused_model"]),
    "a model that another starts from": ({"models.base": {"path": "b"}, "models.ref.init": "base"}, []),
    "a chain of spares": ({"models.one": {"init": "two"}, "models.two": {"init": "actor"}}, ["unused_model"] * 2),
    "a last rate without a schedule": ({"calls.train.optimizer.final_lr_fraction": 0.1}, ["unread_setting"]),
    "a last rate": (
        {"calls.train.optimizer.final_lr_fraction": 0.1, "calls.train.optimizer.schedule": "cosine"},
        [],
    ),
    "a value for errors that end the run": ({"calls.reward.error_value": 0.5}, ["unread_setting"]),
    "a value for errors": ({"calls.reward.error_value": 0.5, "calls.reward.on_error": "score"}, []),
    "a part of a whole number for errors": (
        {
            "calls.reward.error_value": 0.5,
            "calls.reward.on_error": "score",
            "calls.reward.writes": {"reward": "sample int32"},
        },
        ["unread_setting"],
    ),
    "states of frozen weights": (
        {"models.ref.master_dtype": "float64", "models.ref.gradient_checkpointing": True},
        ["unread_setting"] * 2,
    ),
    "states of trained weights": ({"models.actor.master_dtype": "float64"}, []),
    "a temperature of values": ({"calls.train_critic.temperature": 0.5}, ["unread_setting"]),
    "a spare that is off": ({"models.spare": {"init": "actor", "when": 0.0}}, []),
}


def test_sampled_pairs_have_no_order() -> None:
    assert warnings_of(spec_of(dpo_tree()), where, set().__contains__) == ()
    (warning,) = warnings_of(spec_of(online_dpo_tree()), where, set().__contains__)
    assert (warning.rule, warning.where.path) == ("pairs_without_order", "$.calls.train.loss.terms.preference")


@pytest.mark.parametrize("case", CASES)
def test_each_warning_has_its_cause(case: str) -> None:
    changes, rules = CASES[case]
    written = {f"$.{path}" for path in changes}
    found = warnings_of(spec_of(change(rl_tree(), changes)), where, written.__contains__)
    assert [warning.rule for warning in found] == rules
    assert all(warning.text and warning.hint for warning in found)


def test_a_term_that_falls_with_what_it_reads_is_named() -> None:
    lost = {
        f"{KL}.coef": 0.0,
        "models.ref.when": 0.0,
        "calls.train.loss.terms.pull": {"kind": "distill", "teacher": "ref_logprobs"},
    }
    (warning,) = warnings_of(spec_of(change(rl_tree(), lost)), where, set().__contains__)
    assert (warning.rule, warning.where.path) == ("entries_left_out", "$.calls.train.loss.terms.pull")
    assert "reads 'ref_logprobs' of the call 'ref_logp', and models.ref.when is off" in warning.text


@pytest.mark.parametrize(
    ("steps", "said"), [(None, ""), (3, ""), (2, "the whole run has 4"), (1, "the whole run has 2")]
)
def test_a_warm_up_longer_than_the_run_is_named(steps: int | None, said: str) -> None:
    changes = {"calls.train.optimizer.warmup_steps": 6, "calls.train.epochs": 2}
    found = warnings_of(spec_of(change(rl_tree(), changes)), where, set().__contains__, steps)
    assert [warning.rule for warning in found] == (["endless_warmup"] if said else [])
    for warning in found:
        assert warning.where.path == "$.calls.train.optimizer.warmup_steps"
        assert f"takes 6 optimizer steps, but {said}" in warning.text


def test_every_warning_is_tried() -> None:
    assert {warn.__name__ for warn in WARNINGS} == {rule for _, rules in CASES.values() for rule in rules} | {
        "pairs_without_order"
    }


@pytest.mark.parametrize("name", library_names())
def test_the_library_warns_of_nothing(name: str) -> None:
    document = read_document(library_folder() / f"{name}.yaml", name)
    assert graph_and_warnings(document)[1] == ()


OVERRIDES = ("params.kl_coef=0.1", f"{KL}.estimator=k1", f"{POLICY}.ratio=none", "params.minibatches=2")


def test_a_run_has_its_warnings_with_their_places(place: Path) -> None:
    assert check_run(place / "run.yaml").warnings == ()
    run = parse_document((place / "run.yaml").read_text(), "x")
    assert run.wrote("$.steps") and not run.wrote("$.seed")
    found = check_run(place / "run.yaml", OVERRIDES).warnings
    assert [(warning.where.file, warning.where.path) for warning in found] == [
        ("command line", f"$.{KL}.estimator"),
        ("command line", f"$.{POLICY}.ratio"),
        ("realgraph/graphs/library/grpo.yaml", f"$.{POLICY}.clip"),
    ]
    assert found[2].where.line > 0
    assert "2 minibatches are 2 optimizer steps on one batch" in found[1].text


def test_check_prints_each_once_and_succeeds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_command(place / "run.yaml", OVERRIDES)
    shown = capsys.readouterr()
    assert "ok. Graph grpo" in shown.out
    assert shown.err.count("warning: ") == 3
    assert "warning: command line: $.calls.train.loss.terms.kl.estimator: the term 'kl'" in shown.err
    check_command(place / "run.yaml", OVERRIDES, json_out=True)
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["ok"] and shown.err == ""
    assert [warning["rule"] for warning in report["warnings"]] == [
        "kl_without_gradient",
        "several_steps_without_ratio",
        "clip_without_ratio",
    ]
    (place / "graph.yaml").write_text((library_folder() / "grpo.yaml").read_text())
    check_command(place / "graph.yaml", OVERRIDES)
    assert capsys.readouterr().err.count("warning: ") == 3
