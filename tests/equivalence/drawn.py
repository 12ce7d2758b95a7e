"""Trainings drawn at random: a model, a loss, a layout of up to four workers, recomputation."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

from hypothesis import strategies as st

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
    """All layouts of up to four workers that begin at the first one, the simplest first: ep too, which models without
    experts leave out."""
    return tuple(sorted(_layouts(), key=_complexity))


def _complexity(layout: Layout) -> tuple[int, int, int, bool]:
    """Workers, axes, chunks of stages that are named, and if FSDP cuts weights."""
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep))
    return layout.mesh.n_devices, axes, sum(map(len, layout.stages)), layout.sharding == "fsdp"


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


def drawn(choose: Callable[[Sequence[Any]], Any], layouts: Sequence[Layout]) -> Case:
    """A training that every part of the engines can be asked for, under one of `layouts`. choose: one of several, of
    which the first is the simplest."""
    layout = choose(layouts)
    deep = bool(layout.stages) or layout.pp == RANKS
    fitting = [name for name in MODELS if name.endswith("deep") == deep]
    mixtures = [name for name in fitting if MODELS[name][0] in tiny.MIXTURES]
    dense = [name for name in fitting if name not in mixtures]
    model = choose(mixtures if layout.ep > 1 or choose([False] * 4 + [True]) else dense)
    losses = ["sft", "rl", "value", "sequences"]
    if layout.dp < RANKS:  # whose workers share the two samples of a pair
        losses += ["pairs", "scores"]
    if model in mixtures and not deep and layout.dp == layout.pp == 1:  # else not of the same micro-batches
        losses += ["balanced"]
    return Case(model, choose(losses), "float64", layout, choose(RECOMPUTE))


@st.composite
def cases(draw: st.DrawFn, layouts: Sequence[Layout]) -> Case:
    """The same by hypothesis, which finds a small layout and a plain model that fail as well."""
    return drawn(lambda options: draw(st.sampled_from(options)), layouts)
