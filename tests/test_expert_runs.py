"""Runs of a mixture of experts that lie on several workers: the numbers of one device, checkpoints, resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.layout_runs import STEPS, check_resumed
from tests.runs import BASE, GRPO, finish, home, numbers, records, write_run

__all__ = ["home"]

SAVED: dict[str, Any] = {"steps": STEPS, "checkpoint": {"every": 2, "keep": 9}, "models": {"actor": {"path": "moe"}}}
BALANCED = {"calls": {"train": {"loss": {"terms": {"balance": {"kind": "load_balance", "coef": 0.0}}}}}}
REPLAYED = {"models": {"actor": {"routing_replay": True}}}
EP2 = {"devices": 2, "dp": 2, "ep": 2}
# how many devices there are, and how they are used
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replayed_one": (1, {}),
    "replayed": (4, {"train": {"first": 0, **EP2}, "rollout": {"first": 2, "devices": 2, "pp": 2}}),
    "generating": (2, {"train": EP2, "rollout": EP2}),
    "ep4_tp2": (4, {"train": {"devices": 4, "dp": 2, "tp": 2, "ep": 4}}),
}
# differences of rounding alone; over the first micro-batch of each rank; a common beginning in a micro-batch counts
# once; of each micro-batch
NOT_ALIKE = ("logprob_gap", "entropy", "load_imbalance", "load_balance")
TOLERANCE = 2e-3  # of float32, after steps that amplify rounding

_done: dict[str, Path] = {}


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 5},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1},
        **{"q_lora_rank": 12, "kv_lora_rank": 10, "v_head_dim": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"first_k_dense_replace": 1, "intermediate_size": 48},
    },
}


def write_mixture(home: Path, folder: str = "moe", kind: str = "qwen3_moe") -> None:
    """The home's model as a mixture of experts."""
    dense = AutoConfig.from_pretrained(home / "model").to_dict()
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"]
    shape = {name: dense[name] for name in names if kind != "deepseek_v3" or name != "head_dim"}
    config = AutoConfig.for_model(kind, **{**shape, **EXPERTS[kind]})
    shutil.copytree(home / "model", home / folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(home / folder)


def ran(home: Path, name: str) -> Path:
    """The directory of a run that has ended well; each is run once, when it is first asked for."""
    if not (home / "moe").is_dir():
        write_mixture(home)
    if name not in _done:
        n_devices, allocation = RUNS[name]
        machine = {"cluster": {"devices": n_devices}, "allocation": allocation}
        replay = REPLAYED if name.startswith("replayed") else {}
        file = write_run(home, f"experts_{name}", GRPO, SAVED, BALANCED, machine, replay)
        finish(home, "run", str(file), name=f"experts_{name}")
        _done[name] = home / f"experts_{name}"
    return _done[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if not name.endswith("one")])
def test_a_run_with_experts_apart_has_the_numbers_of_one_device(home: Path, name: str) -> None:
    alone = "replayed_one" if name == "replayed" else "one"
    plan = json.loads((ran(home, name) / "plan.json").read_text())["allocations"]
    for call, pin in RUNS[name][1].items():
        assert plan[call]["layout"]["ep"] == pin.get("ep", 1)
    ours, theirs = numbers(ran(home, name)), numbers(ran(home, alone))
    assert ours.keys() == theirs.keys() == set(range(STEPS))
    for step, expected in theirs.items():
        assert ours[step].keys() == expected.keys()
        assert expected["train/load_imbalance"] >= 1
        assert "train/balance_loss" in expected
        for metric, value in expected.items():
            if not metric.endswith(NOT_ALIKE) and "/expert_load_" not in metric:
                assert ours[step][metric] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (step, metric)
    saved = [
        AutoModelForCausalLM.from_pretrained(weights_of(ran(home, run)), experts_implementation="eager")
        for run in (name, alone)
    ]
    tokens = torch.arange(3, 11)[None]
    with torch.no_grad():
        logits, expected_logits = (model(tokens).logits for model in saved)
    torch.testing.assert_close(logits, expected_logits, rtol=TOLERANCE, atol=5 * TOLERANCE)


def test_replayed_experts_stay_while_the_weights_move(home: Path) -> None:
    """The first step has the same samples and weights; its second optimizer step is the first that routers would see
    differently."""
    plain, replayed = (numbers(ran(home, name))[0] for name in ("one", "replayed_one"))
    for same in ("rollout/new_tokens", "train/n_tokens", "train/advantage", "train/importance_weight"):
        assert replayed[same] == pytest.approx(plain[same], rel=1e-6), same
    assert abs(replayed["train/approx_kl"] - plain["train/approx_kl"]) > 1e-3
    assert replayed["train/logprob_gap"] < 1e-5


@pytest.mark.slow
def test_a_stream_of_replicas_that_share_experts_gives_way_and_goes_on(home: Path) -> None:
    """Training, evaluations and new weights come while samples are made; replicas end at different times. Routes go
    with the samples, and with the probes by which generator and trainer are compared."""
    if not (home / "moe").is_dir():
        write_mixture(home)
    late = {
        **SAVED,
        "staleness": 1,
        "batch": {"max_new_tokens": 48},
        "eval": {"every": 1, "data": {**BASE["data"], "path": "test.jsonl"}, "limit": 9},
    }
    machine = {"cluster": {"devices": 2}, "allocation": {"train": EP2, "rollout": EP2}}
    folder = finish(
        home, "run", str(write_run(home, "experts_late", GRPO, late, machine, REPLAYED)), name="experts_late"
    ).folder
    assert [record["step"] for record in records(folder, "eval")] == list(range(STEPS + 1))
    steps = [record["metrics"] for record in records(folder)]
    assert max(step["staleness/max"] for step in steps) >= 1
    gaps = [value for step in steps for name, value in step.items() if name.endswith("update_gap")]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_other_mixtures_generate_and_train_on_devices_of_their_own(home: Path, kind: str) -> None:
    """Weights go from spread experts to cut ones while samples are made; tokens keep the log-probabilities that the
    trainer gives them. Its checkpoints are transformers'."""
    write_mixture(home, kind, kind)
    parts = {"train": {"first": 0, **EP2}, "rollout": {"first": 2, "devices": 2, "tp": 2}}
    other = {"models": {"actor": {"path": kind}}, "runtime": {"verify_weights": 1}, "staleness": 1}
    machine = {"cluster": {"devices": 4}, "allocation": parts}
    folder = finish(home, "run", str(write_run(home, kind, GRPO, SAVED, machine, REPLAYED, other)), name=kind)
    steps = [record["metrics"] for record in records(folder.folder)]
    gaps = [value for step in steps for name, value in step.items() if name.endswith("update_gap")]
    assert gaps and max(gaps) < 1e-4
    model: Any = AutoModelForCausalLM.from_pretrained(weights_of(folder.folder))
    assert model.config.model_type == kind
    assert model(torch.arange(3, 11)[None]).logits.isfinite().all()


def weights_of(run: Path) -> Path:
    """The folder of the last checkpoint's actor."""
    (found,) = (run / f"checkpoints/step-{STEPS:06d}").rglob("model.safetensors")
    return found.parent


def test_a_run_with_experts_apart_goes_on_as_if_it_had_not_stopped(home: Path, tmp_path: Path) -> None:
    check_resumed(ran(home, "replayed"), tmp_path / "moved")
