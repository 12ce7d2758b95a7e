"""Advice to a run that learns nothing."""

from realgraph.runtime.master.advice import FLAT_STEPS, Advice


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


def test_masked_tokens_are_told_once_with_what_helps() -> None:
    advice = Advice()
    assert list(advice.look({"train/overdue": 0.04})) == []
    (text,) = advice.look({"train/overdue": 0.3})
    assert text.startswith("train: 30% of its sampled tokens were older") and "raise `staleness`" in text
    assert list(advice.look({"train/overdue": 0.9})) == []


def test_the_note_about_masked_tokens_names_the_bound_and_the_concurrency_that_fix_it() -> None:
    """And says nothing of what it does not know."""
    metrics = {"train/overdue": 0.3, "staleness/p95": 5.0, "rollout/running": 48.0}
    (text,) = Advice().look(metrics)
    assert "raise `staleness` to 5, which 95% of this step's groups would keep" in text
    assert "set `rollout.max_running` below the 48 sequences that ran at once" in text
    (text,) = Advice().look({"train/overdue": 0.3})
    assert "`max_running`" not in text and "raise `staleness`, or" in text


def test_a_step_that_was_not_taken_is_told_with_its_reason() -> None:
    advice = Advice()
    (text, _) = advice.look({"again/empty_steps": 2.0, "again/overdue": 1.0})
    assert text.startswith("again took no optimizer step for 2 of its mini-batches")
    assert "100% of its sampled tokens were older" in text
    (text,) = advice.look({"train/empty_steps": 1.0})
    assert text.endswith("all of them are masked, or weigh nothing")
