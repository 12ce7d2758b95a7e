"""What a run that learns nothing is told."""

from realgraph.runtime.advice import FLAT_STEPS, Advice


def told(advice: Advice, means: list[float], spread: float = 0.0) -> list[str]:
    steps = [{"advantage/reward": mean, "advantage/reward_square": mean * mean + spread} for mean in means]
    return [text for metrics in steps for text in advice.look(metrics)]


def test_equal_rewards_are_told_once_after_some_steps() -> None:
    advice = Advice()
    assert told(advice, [0.0] * (FLAT_STEPS - 1)) == []
    (text,) = told(advice, [0.0])
    assert "every reward" in text and "was 0:" in text
    assert told(advice, [0.0] * 20) == []


def test_one_step_with_different_rewards_starts_the_count_again() -> None:
    advice = Advice()
    assert told(advice, [1 / 3] * (FLAT_STEPS - 1)) == []
    assert told(advice, [0.5], spread=0.01) == []
    assert told(advice, [1 / 3] * (FLAT_STEPS - 1)) == []
    assert len(told(advice, [1 / 3])) == 1
