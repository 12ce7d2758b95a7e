"""Advice to a run that learns nothing."""

import pytest

from realgraph.graphs.maths import Decoupled, Ignore, Loss, Masked, OffPolicy, PolicyGradient, TokenMean, Truncated
from realgraph.graphs.spec import Train
from realgraph.runtime.master.advice import FLAT_STEPS, Advice


def told(advice: Advice, means: list[float], spread: float = 0.0) -> list[str]:
    steps = [{"advantage/reward": mean, "advantage/reward_square": mean * mean + spread} for mean in means]
    return [text for metrics in steps for text in advice.look(metrics)]


def test_equal_rewards_are_told_once_after_some_steps() -> None:
    advice = Advice({})
    assert told(advice, [0.0] * (FLAT_STEPS - 1)) == []
    (text,) = told(advice, [0.0])
    assert "every reward" in text and "was 0:" in text
    assert told(advice, [0.0] * 20) == []


def test_one_step_with_different_rewards_starts_the_count_again() -> None:
    advice = Advice({})
    assert told(advice, [1 / 3] * (FLAT_STEPS - 1)) == []
    assert told(advice, [0.5], spread=0.01) == []
    assert told(advice, [1 / 3] * (FLAT_STEPS - 1)) == []
    assert len(told(advice, [1 / 3])) == 1


def test_masked_tokens_are_told_once_with_what_helps() -> None:
    advice = Advice({})
    assert list(advice.look({"train/overdue": 0.04})) == []
    (text,) = advice.look({"train/overdue": 0.3})
    assert text.startswith("train: 30% of its sampled tokens were older") and "raise `staleness`" in text
    assert list(advice.look({"train/overdue": 0.9})) == []


def test_the_note_about_masked_tokens_names_the_bound_and_the_concurrency_that_fix_it() -> None:
    """And says nothing of what it does not know."""
    metrics = {"train/overdue": 0.3, "staleness/p95": 5.0, "rollout/running": 48.0}
    (text,) = Advice({}).look(metrics)
    assert "raise `staleness` to 5, which 95% of this step's groups would keep" in text
    assert "set `rollout.max_running` below the 48 sequences that ran at once" in text
    (text,) = Advice({}).look({"train/overdue": 0.3})
    assert "`max_running`" not in text and "raise `staleness`, or" in text


def test_a_step_that_was_not_taken_is_told_with_its_reason() -> None:
    advice = Advice({})
    (text, _) = advice.look({"again/empty_steps": 2.0, "again/overdue": 1.0})
    assert text.startswith("again took no optimizer step for 2 of its mini-batches")
    assert "100% of its sampled tokens were older" in text
    (text,) = advice.look({"train/empty_steps": 1.0})
    assert text.endswith("all of them are masked, or weigh nothing")


def train(*corrections: OffPolicy) -> Advice:
    terms = {f"policy_{i}": PolicyGradient(off_policy=one) for i, one in enumerate(corrections)}
    return Advice({"train": Train(model="actor", loss=Loss({**terms}, TokenMean()), lr=1e-3)})


STALE = {"train/masked_share": 0.12, "staleness/p95": 3.0, "rollout/running": 48.0}


@pytest.mark.parametrize(
    ("correction", "off", "fix"),
    [
        (Decoupled(cap=4.0), "over 4 times", "raise `cap` above 4, or set `exceed: clamp`,"),
        (Masked(low=0.25), "under 0.25 or over 5 times", "widen `low: 0.25` and `high: 5`"),
    ],
)
def test_tokens_that_off_policy_masks_are_told_once_with_the_bound_and_the_concurrency_that_fix_it(
    correction: OffPolicy, off: str, fix: str
) -> None:
    advice = train(correction)
    assert list(advice.look({**STALE, "train/masked_share": 0.05})) == []
    (text,) = advice.look(STALE)
    assert text.startswith("train: 12% of its sampled tokens were left out of the loss by `off_policy`") and off in text
    assert "lower `staleness` to 2: 95% of this step's groups were up to 3 steps old" in text
    assert "set `rollout.max_running` below the 48 sequences that ran at once, or " in text
    assert text.endswith(f"{fix} at `calls.train.loss.terms.policy_0.off_policy`")
    assert list(advice.look(STALE)) == []


@pytest.mark.parametrize("correction", [Truncated(), Decoupled(exceed="clamp"), Ignore()])
def test_tokens_that_are_beyond_a_cap_and_weigh_as_much_as_it_are_no_note(correction: OffPolicy) -> None:
    assert list(train(correction).look(STALE)) == []


def test_of_two_terms_the_one_that_masks_is_named_and_both_kinds_of_masks_are() -> None:
    shares = {"train/policy_0_masked_share": 0.5, "train/policy_1_masked_share": 0.5, "train/overdue": 0.06}
    notes = list(train(Truncated(), Masked()).look({**STALE, **shares, "train/masked_share": 0.0}))
    assert len(notes) == 2
    assert sum("terms.policy_1.off_policy" in text for text in notes) == 1
    assert sum("were older than `staleness` allows" in text for text in notes) == 1


def test_masked_tokens_of_the_newest_weights_are_a_difference_of_engines() -> None:
    """No bound would help."""
    (text,) = train(Decoupled()).look({"train/masked_share": 0.3, "staleness/p95": 0.0})
    assert "newest weights" in text and "`logprob_gap`" in text and "`staleness`" not in text


def test_failures_with_an_error_value_are_told_once_and_where_they_are() -> None:
    advice = Advice({})
    assert list(advice.look({"reward/failed": 0.0})) == []
    (text,) = advice.look({"reward/failed": 0.25})
    assert text.startswith("25% of the executions of reward failed") and "logs/worker-N.log" in text
    assert list(advice.look({"reward/failed": 0.5})) == []


def test_rows_that_are_left_out_are_told_once() -> None:
    advice = Advice({})
    assert list(advice.look({"batch/skipped_groups": 0.0})) == []
    (text,) = advice.look({"batch/skipped_groups": 3.0})
    assert text.startswith("3 rows of this step were left out") and "`data.too_long`" in text
    assert list(advice.look({"batch/skipped_groups": 3.0})) == []
    (text,) = Advice({}, ("judge",)).look({"batch/skipped_groups": 1.0})
    assert "`data.max_prompt_tokens`, `calls.judge.max_prompt_tokens` or `batch.max_new_tokens`" in text
