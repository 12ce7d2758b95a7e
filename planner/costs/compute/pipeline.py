"""Seconds of one optimizer step's micro-batches through pipeline stages. Pure formulas."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.setting import Setting
from realgraph.planner.costs.windows import Seen, fewer_windowed
from realgraph.planner.plan.layout import Schedule, Stages
from realgraph.planner.plan.stages import EMBEDDING_LAYERS, fullest_stage, stage_totals


class MicroBatch(Struct, frozen=True):
    """Seconds of one micro-batch: a layer forward, its backward, and the head's.

    head has forward and backward, in a pass forward alone only the former; transfer is one stage's hand-over to the
    next that nothing hides, either way.
    """

    forward: float
    backward: float
    head: float
    transfer: float = 0.0
    # of each stage, over those of as many mean layers: where stages have other shares of windowed layers; () of none
    surplus: tuple[float, ...] = ()


class Pipeline(Struct, frozen=True):
    """Layers in stages (`plan/stages.py`), worked through in an order."""

    stages: Stages
    schedule: Schedule = "1f1b"


def with_surplus(setting: Setting, stages: Stages, seen: Seen, at: Callable[[float], MicroBatch]) -> MicroBatch:
    """The mean layer's micro-batch, and what stages with fewer windowed layers take more. at: one where each query sees
    so many tokens."""
    one, fewer = at(seen.mean), fewer_windowed(setting.model, stages)
    if seen.full == seen.windowed or not fewer:
        return one
    full, windowed = at(seen.full), at(seen.windowed)
    saved = full.forward + full.backward - windowed.forward - windowed.backward
    return replace(one, surplus=tuple(saved * layers for layers in fewer))


def stage_seconds(one: MicroBatch, stages: Stages) -> float:
    """Seconds of the fullest stage, the head's on the last of them; hand-overs apart."""
    layer = one.forward + one.backward
    surplus = [seconds / layer for seconds in one.surplus]
    return fullest_stage(stages, (EMBEDDING_LAYERS, one.head / layer), surplus) * layer


def pipeline_seconds(one: MicroBatch, pipeline: Pipeline, count: int) -> float:
    """`count` micro-batches forward and backward through `stages`.

    1F1B: the fullest stage works without pause between filling and draining the others (arXiv:2104.04473, sec. 2.2).
    Interleaved: stages hold chunks of layers, and filling takes 1 / chunks as long (ibid.), where `count` is a multiple
    of the stages: chunks take turns, a stage's worth of micro-batches at a time.
    """
    layers, stages = sum(stage_totals(pipeline.stages)), len(pipeline.stages)
    layer = one.forward + one.backward
    if stages == 1:
        return count * (layers * layer + one.head)
    fullest = stage_seconds(one, pipeline.stages)
    mean = (layers * layer + one.head) / stages
    steady = count * (fullest + 2 * one.transfer)
    if pipeline.schedule == "interleaved":
        chunks = len(pipeline.stages[0])
        return steady + (chunks - 1) * count * one.transfer + (stages - 1) * (mean / chunks + 2 * one.transfer)
    return steady + (stages - 1) * (mean + 2 * one.transfer)


def forward_pipeline_seconds(one: MicroBatch, stages: Stages, count: int) -> float:
    """`count` micro-batches forward alone, through stages one after the other; the head's seconds forward."""
    layers = sum(stage_totals(stages))
    fullest = stage_seconds(one, stages) + one.transfer
    return count * fullest + (len(stages) - 1) * (layers * one.forward + one.head) / len(stages)
