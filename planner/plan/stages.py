"""The layers of each pipeline stage and of its chunks: one rule for seconds, bytes and the engines that follow a plan.

Layers lie in order: chunk 0 of every stage, then chunk 1 of every stage, and so on (Narayanan et al. 2021,
arXiv:2104.04473, sec. 2.2); the embedding lies before the first layer, the head behind the last. Costs are in units of
one layer; all layers cost as much as their mean.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from realgraph.planner.inputs.model_spec import Head, ModelSpec
from realgraph.planner.plan.layout import Layout, Stages

EMBEDDING_LAYERS = 0.0  # seconds of the embedding in layers: it reads one row a token and multiplies nothing

# Seconds of a layer with routed experts over those that its operations take: routing, permutation, exchange and small
# products. The cost model says 1.6 to 2.3 for published runs of GPT-OSS, Qwen3-MoE and DeepSeek-V3 on H100s.
EXPERT_SLOWDOWN = 2.0


@lru_cache(maxsize=1 << 8)
def head_layers(model: ModelSpec, head: Head) -> float:
    """The head's cost in layers: operations of its matrix over those of a mean layer's, for one token.

    Told to a thousandth: stages that differ by the head of a critic are alike.
    """
    slowdown = 1 + (EXPERT_SLOWDOWN - 1) * model.expert_layers / model.layers
    return round(model.head_flops(head) * model.layers / (2 * model.active_params() * slowdown), 3)


@lru_cache(maxsize=1 << 12)
def balanced_stages(layers: int, stages: int, chunks: int = 1, ends: tuple[float, float] = (0.0, 0.0)) -> Stages:
    """Layers of each stage's chunks, such that no other way has a cheaper fullest stage: [stages][chunks].

    ends: cost of the embedding on the first stage, and of the head on the last. Each chunk has a layer at least. Of
    stages that are filled alike the later gets one more: it keeps fewer micro-batches. A stage's layers do not depend
    on `chunks` unless it would have fewer of them. Raises ValueError where there are fewer layers than chunks in all.
    """
    if layers < stages * chunks:
        raise ValueError(f"{stages} stages of {chunks} chunks are more than the {layers} layers")
    loads = [0.0] * stages
    loads[0] += ends[0]
    loads[-1] += ends[1]
    totals = _filled(layers, loads, chunks)
    by_stage = []
    for stage, total in enumerate(totals):
        inside = [0.0] * chunks
        inside[0] += ends[0] * (stage == 0)
        inside[-1] += ends[1] * (stage == stages - 1)
        by_stage.append(_filled(total, inside, 1))
    return tuple(by_stage)


def _filled(units: int, loads: Sequence[float], least: int) -> tuple[int, ...]:
    """Units for each of some bins that carry `loads` already, `least` each, then one by one to the lightest.

    The fullest bin is as light as can be: each unit that makes it heavier found all others as heavy, but for one unit.
    """
    counts = [least] * len(loads)
    heap = [(load + least, -i) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(units - least * len(loads)):
        weight, place = heap[0]
        counts[-place] += 1
        heapq.heapreplace(heap, (weight + 1, place))
    return tuple(counts)


def stages_of(model: ModelSpec, head: Head, layout: Layout, chunks: int = 1) -> Stages:
    """Layers of each stage's chunks under a layout: what it says, else balanced by the model's operations a token."""
    if layout.stages:
        return layout.stages
    return balanced_stages(model.layers, layout.pp, chunks, (EMBEDDING_LAYERS, head_layers(model, head)))


@lru_cache(maxsize=1 << 12)
def stage_totals(stages: Stages) -> tuple[int, ...]:
    """Layers of each stage, its chunks together."""
    return tuple(sum(chunks) for chunks in stages)


def fullest_stage(stages: Stages, ends: tuple[float, float], surplus: Sequence[float] = ()) -> float:
    """Cost of the fullest stage in layers, the embedding's and the head's included. surplus: of each stage, besides."""
    return max(map(sum, zip(stage_loads(stages, ends), surplus or [0.0] * len(stages), strict=True)))


def stage_loads(stages: Stages, ends: tuple[float, float]) -> list[float]:
    """Cost of each stage in layers, the embedding's and the head's included."""
    loads = [float(total) for total in stage_totals(stages)]
    loads[0] += ends[0]
    loads[-1] += ends[1]
    return loads


def layer_ranges(stages: Stages) -> tuple[tuple[range, ...], ...]:
    """The layers that lie on each stage, chunk by chunk: [stages][chunks]."""
    ranges_of: list[list[range]] = [[] for _ in stages]
    first = 0
    for turn in zip(*stages, strict=True):
        for stage, count in enumerate(turn):
            ranges_of[stage].append(range(first, first + count))
            first += count
    return tuple(map(tuple, ranges_of))


def stages_fault(stages: Stages, layers: int, pp: int, chunks: int) -> str:
    """Reason why a model of so many layers can't lie so on `pp` stages of `chunks` chunks, '' where it can."""
    if len(stages) != pp:
        return f"{len(stages)} stages have layers, pp is {pp}"
    if any(len(one) != chunks for one in stages):
        return f"each stage needs {chunks} number{'s' * (chunks > 1)} of layers: it has {chunks} chunk" + "s" * (
            chunks > 1
        )
    if min(chain(*stages)) < 1:
        return "a stage without layers"
    if sum(chain(*stages)) != layers:
        return f"the stages have {sum(chain(*stages))} layers, the model {layers}"
    return ""
