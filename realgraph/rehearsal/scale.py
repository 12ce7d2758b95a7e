"""The scale of a rehearsal: how long a sample and how large a step is there, and what that makes of token counts."""

import math

from msgspec import Struct

from realgraph.graphs.spec import Train
from realgraph.planner.options.calls import mean_tokens, microbatches_of
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.request import PlanRequest

LONGEST_SAMPLE = 12  # tokens of a rehearsal's longest sample, unless more workers share one
TOKENS_A_CHUNK = 2  # of a sample that context-parallel workers share, each of them two chunks
SAMPLES = 64  # of a rehearsal's step, unless ranks, mini-batches and micro-batches need more


class ToyScale(Struct, frozen=True):
    """Tokens of the longest prompt and response of the run, and of its expected sample; its groups a step, and the
    groups and the longest sample of its rehearsal."""

    prompt: int
    response: int
    mean: float
    groups: int
    toy_groups: int
    longest: int = LONGEST_SAMPLE

    @property
    def factor(self) -> float:
        """Lengths are multiplied by it; 1 where samples are short already."""
        return min(1.0, self.longest / (self.prompt + self.response))

    def shortened(self, tokens: int) -> int:
        """A length of part of a sample: at least 2 tokens, or all of them."""
        return max(min(2, tokens), round(tokens * self.factor))

    @property
    def sample(self) -> int:
        """Tokens of the rehearsal's longest sample."""
        return self.shortened(self.prompt) + self.shortened(self.response)

    def samples(self, tokens: int) -> float:
        """Samples of the rehearsal in the place of so many tokens of the run: of its expected length there."""
        return tokens / self.mean * self.toy_groups / self.groups

    def microbatch(self, tokens: int, typical: float) -> int:
        """Tokens of a micro-batch, such that as many of them hold a step as in the run: of whole samples, at least of
        the longest. typical: tokens of one of the rehearsal's samples."""
        return max(self.sample, math.ceil(round(self.samples(tokens)) * typical))

    def cache(self, tokens: int, typical: float) -> int:
        """Tokens of a cache that holds as large a part of a step as in the run, and a sample at least."""
        return max(self.sample, math.ceil(self.samples(tokens) * typical))

    def sequences(self, running: int) -> int:
        """Sequences that decode at once."""
        return math.ceil(running * self.toy_groups / self.groups)


def scale_of(request: PlanRequest, plan: Plan) -> ToyScale:
    """The scale that makes a step small, with a group for every rank in every mini-batch, and a sample for each of its
    micro-batches, where the run has so many."""
    workload = request.workload
    steps = {name: call.minibatches for name, call in request.graph.calls.items() if isinstance(call, Train)}
    ranks = max((allocation.layout.dp for allocation in plan.allocations.values()), default=1)
    samples = SAMPLES
    for name, allocation in plan.allocations.items():
        count = microbatches_of(request, name, allocation, request.cluster)
        samples = max(samples, count * allocation.layout.dp * steps.get(name, 1))
    each = ranks * max(steps.values(), default=1)
    groups = each * math.ceil(samples / (each * workload.samples_per_group))
    shared = max((allocation.layout.cp for allocation in plan.allocations.values()), default=1)
    return ToyScale(
        prompt=workload.prompt_tokens,
        response=workload.max_new_tokens,
        mean=mean_tokens(request),
        groups=workload.groups,
        toy_groups=min(workload.groups, groups),
        longest=max(LONGEST_SAMPLE, 2 * TOKENS_A_CHUNK * shared),
    )
