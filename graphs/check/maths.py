"""Rules about the maths: which advantage steps and loss terms make sense together, and on which samples."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, takewhile

from realgraph.graphs.errors import Problem
from realgraph.graphs.facts import Facts
from realgraph.graphs.infer import Draft
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, LogprobSemantics
from realgraph.graphs.maths import (
    Masked,
    PairMean,
    PolicyGradient,
    Term,
)
from realgraph.graphs.spec import Advantage, Generate, Train
from realgraph.graphs.steps import AdaptiveKL, Center, KLPenalty, Overlong, Step

PlacedStep = tuple[str, str, Step]  # its path, its name, and itself


def steps_of(draft: Draft) -> Iterator[PlacedStep]:
    """Every advantage step."""
    return chain.from_iterable(_step_lists(draft))


def _step_lists(draft: Draft) -> Iterator[list[PlacedStep]]:
    """The steps of each advantage call, in their order."""
    for name, call in draft.of(Advantage):
        steps = call.steps.items()
        yield [(f"$.calls.{name}.steps.{entry}", entry, step) for entry, step in steps if step is not None]


def terms_of(draft: Draft) -> Iterator[tuple[str, Train, str, Term]]:
    """Every loss term with its path, its train call and its name."""
    for name, call in draft.of(Train):
        for entry, term in call.loss.terms.items():
            yield f"$.calls.{name}.loss.terms.{entry}", call, entry, term


# --- advantages -------------------------------------------------------------------------------------------------------


def group_of_one(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A group of one sample has no other to be compared with: its advantage would always be zero."""
    if draft.samples_per_group > 1:
        return
    generate = draft.leading
    hint = f"set calls.{generate}.n to 2 or more, or use `by: batch`" if generate else "use `by: batch`"
    for path, entry, step in steps_of(draft):
        if step.compares_samples:
            yield draft.problem(path, f"the step {entry!r} compares the samples of a group, but a group has one", hint)


def two_returns(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Rewards are summed over time once: by gae or by return."""
    for steps in _step_lists(draft):
        for first, path, entry, step in _after(steps, lambda step: step.makes_returns):
            if step.makes_returns:
                text = f"the step {entry!r} sums rewards over time, which {first!r} has done already"
                yield draft.problem(path, text, f"set one of them to null: steps.{entry}: null")


def reward_after_return(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Steps that change the reward stand before those that turn rewards into advantages."""
    for steps in _step_lists(draft):
        for first, path, entry, step in _after(steps, lambda step: step.makes_returns):
            if step.changes_reward and not step.makes_returns:
                text = f"the step {entry!r} changes the reward, but {first!r} has already turned it into advantages"
                yield draft.problem(path, text, f"write {entry!r} before {first!r}")


def overlong_after_baseline(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A length penalty that comes after the baseline would push every long sample down, however good its group is.

    What follows returns is the affair of `reward_after_return`.
    """
    for steps in _step_lists(draft):
        rewards = takewhile(lambda placed: not placed[2].makes_returns, steps)
        for first, path, entry, step in _after(rewards, lambda step: step.takes_baseline):
            if isinstance(step, Overlong):
                text = f"the step {entry!r} changes the reward, but {first!r} has taken its baseline of it already"
                hint = f"write {entry!r} before {first!r}; over a graph's own steps: {{{entry}: ..., {first}: {{}}}}"
                yield draft.problem(path, text, hint)


def _after(steps: Iterable[PlacedStep], begins: Callable[[Step], bool]) -> Iterator[tuple[str, str, str, Step]]:
    """The steps behind the first that `begins`, each with the name of that one."""
    first = ""
    for path, entry, step in steps:
        if first:
            yield first, path, entry, step
        elif begins(step):
            first = entry


def center_key(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """`by: key` and `key` come together."""
    for path, entry, step in steps_of(draft):
        if isinstance(step, Center) and step.by == "key" and step.key is None:
            yield draft.problem(path, f"the step {entry!r} subtracts a key, but names none", "add `key: <name>`")
        if isinstance(step, Center) and step.by != "key" and step.key is not None:
            text = f"the step {entry!r} subtracts a mean by {step.by}, so {step.key!r} would not be used"
            yield draft.problem(f"{path}.key", text, "write `by: key`, or remove `key`")


def overlong_limits(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The penalty grows from `start` to `limit`, and begins at lengths that samples reach."""
    generates = dict(draft.of(Generate))
    for path, entry, step in steps_of(draft):
        if not isinstance(step, Overlong):
            continue
        generate = generates.get(draft.samplers.get(path.split(".")[2], ""))
        longest = generate.most_new_tokens(facts.max_new_tokens) if generate else facts.max_new_tokens
        if step.start >= step.limit:
            text = f"the step {entry!r} begins at {step.start} tokens, not before its limit of {step.limit}"
            yield draft.problem(f"{path}.start", text, "`start` is where the penalty begins, `limit` where it is -1")
        elif longest is not None and step.start >= longest:
            text = f"the step {entry!r} begins at {step.start} tokens, but samples end at {longest}"
            yield draft.problem(f"{path}.start", text, f"set `start` below {longest}, and `limit` to at most {longest}")


def adaptive_horizon(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """One update multiplies the coefficient by at least 1 - 0.2 x samples / horizon, which must stay positive."""
    if facts.groups is None:
        return
    samples = facts.groups * draft.samples_per_group
    for path, entry, step in steps_of(draft):
        if isinstance(step, KLPenalty) and isinstance(step.coef, AdaptiveKL) and samples >= 5 * step.coef.horizon:
            text = f"{samples} samples a step could drive the coefficient of {entry!r} below zero"
            yield draft.problem(f"{path}.coef.horizon", text, f"set `horizon` above {samples / 5:g} samples")


# --- sampling against the loss ----------------------------------------------------------------------------------------


def greedy_sampling(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Greedy decoding has no distribution: neither a policy gradient nor a KL can be estimated from it."""
    for name in [name for name, call in draft.of(Generate) if call.temperature == 0]:
        terms = [(path, entry) for path, _, entry, term in terms_of(draft) if isinstance(term, PolicyGradient)]
        users = [f"the policy gradient {entry!r}" for path, entry in terms if _works_on(draft, path, name)]
        users += _comparing_steps(draft, name)
        if users:
            text = f"{name!r} decodes greedily, but {' and '.join(users)} needs samples of a distribution"
            yield draft.problem(f"$.calls.{name}.temperature", text, "set a temperature above 0, such as 1.0")


def _works_on(draft: Draft, path: str, generate: str) -> bool:
    """True where the call of an entry at `path` works on the samples of a generate call."""
    return draft.samplers.get(path.split(".")[2]) == generate


def _behaviour(draft: Draft, path: str) -> tuple[str, LogprobSemantics] | None:
    """The generate call on whose samples the call at `path` works, and the distribution that it draws from, where it is
    one: greedy decoding is none."""
    sampler = draft.samplers.get(path.split(".")[2], "")
    several = sum(1 for _ in draft.of(Generate)) > 1
    behaviour = draft.semantics(f"{sampler}.{BEHAVIOUR_LOGPROBS}" if several else BEHAVIOUR_LOGPROBS)
    if behaviour is None or not behaviour.behaviour or behaviour.temperature == 0:
        return None
    return sampler, behaviour


def _comparing_steps(draft: Draft, generate: str) -> list[str]:
    """The steps that compare log-probabilities with those of sampling by a generate call."""
    compared = [(path, entry) for path, entry, step in steps_of(draft) if step.compared_logprobs is not None]
    return [f"the step {entry!r}" for path, entry in compared if _works_on(draft, path, generate)]


def behaviour_temperature(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """The loss divides logits by the temperature that sampling used: else its ratios are wrong from the first step."""
    for name, call in draft.of(Train):
        found = _behaviour(draft, f"$.calls.{name}")
        learns = any(isinstance(term, PolicyGradient) for term in call.loss.terms.values())
        if learns and found is not None and call.temperature != found[1].temperature:
            sampler, behaviour = found
            text = (
                f"the policy gradient takes log-probabilities at temperature {call.temperature:g}, "
                f"but {sampler!r} samples at {behaviour.temperature:g}"
            )
            yield draft.problem(
                f"$.calls.{name}.temperature", text, f"set `temperature: {behaviour.temperature:g}` here"
            )


def truncated_sampling(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """top-p and top-k renormalise over part of the vocabulary: ratios to the full distribution are then biased."""
    for name, call in draft.of(Generate):
        if call.top_p == 1 and call.top_k == 0:
            continue
        users = [
            f"the importance ratio of {entry!r}"
            for path, _, entry, term in terms_of(draft)
            if isinstance(term, PolicyGradient) and term.ratio != "none" and _works_on(draft, path, name)
        ]
        users += _comparing_steps(draft, name)
        field = "top_p" if call.top_p < 1 else "top_k"
        text = f"{name!r} samples from part of the vocabulary ({field}), but {' and '.join(users)} needs all of it"
        if users:
            yield draft.problem(f"$.calls.{name}.{field}", text, "set `top_p: 1.0` and `top_k: 0`")


def reference_temperature(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Log-probabilities that are compared with the policy's are taken at the policy's temperature."""
    for path, call, entry, term in terms_of(draft):
        if term.compared_logprobs is not None:
            yield from _same_temperature(draft, path, term.compared_logprobs, call.temperature, f"the term {entry!r}")
    for path, entry, step in steps_of(draft):
        found = _behaviour(draft, path)
        if found is not None and step.compared_logprobs is not None:
            temperature = found[1].temperature
            yield from _same_temperature(draft, path, step.compared_logprobs, temperature, f"the step {entry!r}")


def _same_temperature(draft: Draft, path: str, key: str, temperature: float, by: str) -> Iterator[Problem]:
    semantics = draft.semantics(key)
    if semantics is not None and semantics.temperature not in (0, temperature):
        text = (
            f"{by} compares log-probabilities at temperature {temperature:g} with {key!r} at {semantics.temperature:g}"
        )
        yield draft.problem(path, text, f"set `temperature: {temperature:g}` in calls.{draft.producer(key)}")


# --- losses -----------------------------------------------------------------------------------------------------------


def empty_loss(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A loss has a term with a gradient."""
    for name, call in draft.of(Train):
        terms = call.loss.terms.values()
        if not terms:
            yield draft.problem(
                f"$.calls.{name}.loss.terms", "the loss has no terms", "add one, or check `when` switches"
            )
        elif all(term.coefficient == 0 for term in terms):
            text = "every term of the loss has the coefficient 0: the call would train nothing"
            yield draft.problem(f"$.calls.{name}.loss.terms", text, "give one a coefficient, or remove the call")


def pair_aggregate(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Losses over pairs are averaged over pairs, others are not."""
    for name, call in draft.of(Train):
        pairs = [entry for entry, term in call.loss.terms.items() if term.of_pairs]
        others = [entry for entry in call.loss.terms if entry not in pairs]
        over_pairs = isinstance(call.loss.aggregate, PairMean)
        path = f"$.calls.{name}.loss.aggregate"
        if pairs and not over_pairs:
            text = f"the term {pairs[0]!r} compares pairs of samples, so the loss is a mean over pairs"
            yield draft.problem(path, text, "write `aggregate: {kind: pair_mean}`")
        if others and over_pairs:
            text = f"the term {others[0]!r} has a loss per token, so pair_mean can't average it"
            yield draft.problem(
                path, text, "write `aggregate: {kind: token_mean}`, or move the term to another train call"
            )


def pair_size(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """Losses over pairs need groups of two."""
    for path, _, entry, term in terms_of(draft):
        if term.of_pairs and draft.samples_per_group != 2:
            text = f"the term {entry!r} compares the two samples of a group, but a group has {draft.samples_per_group}"
            yield draft.problem(path, text, "set `n: 2` in the generate call")


def empty_mask(draft: Draft, facts: Facts) -> Iterator[Problem]:
    """A mask of off-policy samples lets some through: those of the policy that is trained, whose ratio is 1."""
    for path, _, entry, term in terms_of(draft):
        if isinstance(term, PolicyGradient) and isinstance(term.off_policy, Masked):
            low, high = term.off_policy.low, term.off_policy.high
            if not low <= 1 <= high:
                text = f"the term {entry!r} masks ratios outside [{low:g}, {high:g}], and that of fresh samples is 1"
                yield draft.problem(f"{path}.off_policy", text, "write bounds around 1, such as `low: 0.5, high: 5.0`")
