"""Seconds of one optimizer step's micro-batches through pipeline stages. Pure formulas."""

import math

from msgspec import Struct

from realgraph.planner.plan.layout import Schedule


class MicroBatch(Struct, frozen=True):
    """Seconds of one micro-batch: a layer forward, its backward, and the head's.

    head has forward and backward; transfer is one stage's hand-over to the next that nothing hides, either way.
    """

    forward: float
    backward: float
    head: float
    transfer: float = 0.0


class Pipeline(Struct, frozen=True):
    """`layers` in `stages`, worked through in an order."""

    layers: int
    stages: int
    schedule: Schedule = "1f1b"
    chunks: int = 2  # groups of layers of a stage, where interleaved


def stage_layers(layers: int, stages: int, head: float) -> float:
    """Work of the fullest stage in layers, the last of them with a head worth `head` layers.

    Stages hold whole layers. Either all hold as many and the last is the fullest, or the last holds fewer.
    """
    if stages == 1:
        return layers + head
    even = math.ceil(layers / stages) + head
    last = max(0, math.floor((layers - (stages - 1) * head) / stages))
    best = even
    for kept in (last, last + 1):
        if kept < layers:
            best = min(best, max(math.ceil((layers - kept) / (stages - 1)), kept + head))
    return max(best, (layers + head) / stages)


def pipeline_seconds(one: MicroBatch, pipeline: Pipeline, count: int) -> float:
    """`count` micro-batches forward and backward through `stages`.

    1F1B: the fullest stage works without pause between filling and draining the others (arXiv:2104.04473, sec. 2.2).
    Interleaved: stages hold `chunks` groups of layers, and filling takes 1 / chunks as long (ibid.), where `count` is a
    multiple of the stages: groups take turns, a stage's worth of micro-batches at a time.
    """
    layers, stages = pipeline.layers, pipeline.stages
    layer = one.forward + one.backward
    if stages == 1:
        return count * (layers * layer + one.head)
    fullest = stage_layers(layers, stages, one.head / layer) * layer
    mean = (layers * layer + one.head) / stages
    steady = count * (fullest + 2 * one.transfer)
    if pipeline.schedule == "interleaved":
        groups = max(1, min(pipeline.chunks, layers // stages))
        return steady + (groups - 1) * count * one.transfer + (stages - 1) * (mean / groups + 2 * one.transfer)
    return steady + (stages - 1) * (mean + 2 * one.transfer)
