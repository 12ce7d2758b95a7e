"""The functions that `ppo_nine_calls.yaml` names: a mixed reward, and a reward model that learns from two others."""

from typing import Any


def mixed(judge_score: float, helpful_score: float, harmless_score: float) -> float:
    """The mean of three reward models' scores."""
    return (judge_score + helpful_score + harmless_score) / 3


def regression(batch: Any, outputs: Any) -> Any:
    """Squared error per token [T] of the judge's score to the mean of the other two."""
    target = (batch.sample_keys["helpful_score"] + batch.sample_keys["harmless_score"]) / 2
    return (outputs.scores - target).square()[batch.sample_index()]
