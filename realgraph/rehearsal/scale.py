"""The scale of a rehearsal: how long a sample and how large a step is there, and what that makes of token counts."""

import math

from msgspec import Struct

from realgraph.graphs.spec import Train
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.request import PlanRequest

LONGEST_SAMPLE = 16  # tokens of a rehearsal's longest sample, unless more workers share one
TOKENS_A_CHUNK = 2  # of a sample that context-parallel workers share, each of them two chunks
SAMPLES = 64  # of a rehearsal's step, unless ranks and mini-batches need more


class ToyScale(Struct, frozen=True):
    """Tokens of the longest prompt and response of the run, its groups a step, and the groups and the longest sample of
    its rehearsal."""

    prompt: int
    response: int
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

    def tokens(self, tokens: int) -> int:
        """Tokens of a micro-batch or a cache: such that as many of them hold a step as in the run."""
        length = self.sample / (self.prompt + self.response)
        return max(1, math.ceil(tokens * length * self.toy_groups / self.groups))

    def sequences(self, running: int) -> int:
        """Sequences that decode at once."""
        return math.ceil(running * self.toy_groups / self.groups)


def scale_of(request: PlanRequest, plan: Plan) -> ToyScale:
    """The scale that makes a step small, with a group for every rank in every mini-batch where the run has so many."""
    workload = request.workload
    ranks = max((allocation.layout.dp for allocation in plan.allocations.values()), default=1)
    minibatches = max((call.minibatches for call in request.graph.calls.values() if isinstance(call, Train)), default=1)
    each = ranks * minibatches
    groups = each * math.ceil(SAMPLES / (each * workload.samples_per_group))
    shared = max((allocation.layout.cp for allocation in plan.allocations.values()), default=1)
    longest = max(LONGEST_SAMPLE, 2 * TOKENS_A_CHUNK * shared)
    toy_groups = min(workload.groups, groups)
    return ToyScale(workload.prompt_tokens, workload.max_new_tokens, workload.groups, toy_groups, longest)
