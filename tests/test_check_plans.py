"""`realgraph check` names what no plan of a run can be, without a search and without looking at machines."""

import json
from pathlib import Path

import pytest

from realgraph.commands.check import check_command
from realgraph.graphs.errors import ConfigError
from tests.run_texts import place

__all__ = ["place"]

WHOLE = "cluster={nodes: 1, devices: 4, kind: cpu}"
CASES = {
    "tokens of a cache in a train call": ("allocation.train.kv_cache_tokens=64", "$.allocation.train.kv_cache_tokens"),
    "a mesh beyond the cluster": ("allocation.train.devices=8", "$.allocation.train"),
    "a call that holds no devices": ("allocation.reward.dp=1", "$.allocation.reward"),
    "responses that leave no room": ("batch.max_new_tokens=1000000", "$.batch.max_new_tokens"),
}


SIZES = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def sized(place: Path) -> Path:
    """A run file whose model has a shape."""
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    return place / "run.yaml"


def test_a_run_that_has_plans_is_fine(sized: Path) -> None:
    check_command(sized, [WHOLE, "allocation.train={devices: 4, tp: 2}"])


@pytest.mark.parametrize("case", CASES)
def test_a_pin_that_no_plan_can_have_is_refused(sized: Path, case: str) -> None:
    override, path = CASES[case]
    with pytest.raises(ConfigError) as refused:
        check_command(sized, [WHOLE, override])
    assert path in [problem.where.path for problem in refused.value.problems]
    assert {problem.where.file for problem in refused.value.problems} == {"command line"}


@pytest.mark.parametrize(
    "unknown", [["cluster={nodes: 1}"], [WHOLE, "models.actor.path=nobody/has-this-model"]], ids=["machines", "shape"]
)
def test_what_is_not_known_here_is_left_to_the_planner(sized: Path, unknown: list[str]) -> None:
    check_command(sized, [*unknown, "allocation.train.kv_cache_tokens=64"])


def test_servers_that_a_search_places_are_no_mistake(sized: Path) -> None:
    served = [WHOLE, "rollout={engine: sglang, python: python3}"]
    check_command(sized, served)
    with pytest.raises(ConfigError, match="kv_cache_tokens"):
        check_command(sized, [*served, "allocation.train.kv_cache_tokens=64"])


def test_a_local_model_without_a_shape_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="model"):
        check_command(place / "run.yaml", [WHOLE])
