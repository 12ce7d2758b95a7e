"""Trainings drawn at random: a model, a loss, a layout of up to four workers, recomputation."""

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Literal

from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute
from tests import tiny
from tests.equivalence.layouts import TWICE
from tests.equivalence.training import MODELS, Case

RANKS = 4
SMALL = (1, 2, 4)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Literal["replicated", "fsdp"], ...] = ("replicated", "fsdp")
UNEVEN = ((3,), (1,))  # of a model of four layers


def every_layout() -> tuple[Layout, ...]:
    """All layouts of up to four workers that begin at the first one: ep too, which models without experts leave out."""
    return tuple(_layouts())


def _layouts() -> Iterator[Layout]:
    for dp, tp, pp, cp in product(SMALL, repeat=4):
        n_devices = dp * tp * pp * cp
        if not 1 < n_devices <= RANKS:
            continue
        for ep, sharding, stages in product(SMALL, SHARDINGS, ((), TWICE, UNEVEN)):
            stage = n_devices // pp
            if stage % ep or (sharding == "fsdp" and dp * cp == 1) or (stages and pp != 2):
                continue
            mesh = DeviceMesh(0, n_devices)
            yield Layout(mesh, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, sharding=sharding, stages=stages)


def drawn(random: Random) -> Case:
    """A training that every part of the engines can be asked for."""
    layout = random.choice(every_layout())
    deep = bool(layout.stages) or layout.pp == RANKS
    fitting = [name for name in MODELS if name.endswith("deep") == deep]
    mixtures = [name for name in fitting if MODELS[name][0] in tiny.MIXTURES]
    dense = [name for name in fitting if name not in mixtures]
    model = random.choice(mixtures if layout.ep > 1 or random.random() < 0.2 else dense)
    losses = ["rl", "sft", "value", "sequences"]
    if layout.dp < RANKS:  # whose workers share the two samples of a pair
        losses += ["pairs", "scores"]
    if model in mixtures and not deep and layout.dp == layout.pp == 1:  # else not of the same micro-batches
        losses += ["balanced"]
    return Case(model, random.choice(losses), "float64", layout, random.choice(RECOMPUTE))
