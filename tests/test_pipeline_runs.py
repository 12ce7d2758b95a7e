"""Runs whose train and inference calls go through pipeline stages: the numbers of one device, checkpoints, resume."""

import json
import shutil
from pathlib import Path

import pytest

from tests.layout_runs import LayoutRun, check_numbers, check_resume, ran
from tests.runs import home

__all__ = ["home"]

ROLLOUT = {"rollout": {"devices": 2}}
TWO = {"devices": 2, "pp": 2}
SMALL = {**TWO, "max_tokens_per_microbatch": 64}
FOUR = {"devices": 4, "tp": 2, "pp": 2}
PPO_CALLS = ("train_actor", "train_critic", "ref_logp", "values")
RUNS = [
    LayoutRun(
        "grpo_pp_saving", "grpo", 2, {"train": {**SMALL, "recompute": "full", "residency": "offloaded"}, **ROLLOUT}
    ),
    LayoutRun(
        "grpo_interleaved",
        "grpo_deep",
        4,
        {"train": {**SMALL, "devices": 4, "dp": 2, "schedule": "interleaved", "chunks": 2}, "rollout": {"devices": 4}},
    ),
    LayoutRun("ppo_tp_pp", "ppo", 4, dict.fromkeys(PPO_CALLS, FOUR)),
    LayoutRun("grpo_all_pp", "grpo", 2, {"train": SMALL, "rollout": TWO}),
    LayoutRun(
        "grpo_all_interleaved",
        "grpo_deep",
        2,
        {"train": {**SMALL, "schedule": "interleaved", "chunks": 2}, "rollout": TWO},
    ),
]


@pytest.fixture(scope="module", autouse=True)
def deep(home: Path) -> None:
    """A model of four layers: two stages of two chunks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(home / "model", home / "deep")
    config = AutoConfig.from_pretrained(home / "deep", num_hidden_layers=4)
    config.layer_types = config.layer_types * 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(home / "deep")


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_in_stages_has_the_numbers_of_one_device(home: Path, run: LayoutRun) -> None:
    check_numbers(home, run)


def test_generation_lies_on_the_chunks_of_the_weights_that_it_uses(home: Path) -> None:
    plan = json.loads((ran(home, RUNS[-1]) / "plan.json").read_text())["allocations"]
    assert plan["rollout"]["layout"]["stages"] == [[1, 1], [1, 1]]


def test_a_run_in_stages_goes_on_as_if_it_had_not_stopped(home: Path, tmp_path: Path) -> None:
    """With stages of several chunks, and several replicas of each."""
    check_resume(home, tmp_path / "moved", RUNS[1])
