"""Layers of pipeline stages and chunks: each once, in order, balanced as well as can be, and read alike by costs."""

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.compute.pipeline import MicroBatch, Pipeline, pipeline_seconds
from realgraph.planner.costs.memory import memory
from realgraph.planner.costs.memory.memory import Running
from realgraph.planner.plan.layout import DeviceMesh, Layout, Stages
from realgraph.planner.plan.stages import (
    balanced_stages,
    fullest_stage,
    head_layers,
    layer_ranges,
    stage_totals,
    stages_fault,
    stages_of,
)
from tests.planner_cases import known

ENDS = st.tuples(st.sampled_from((0.0, 0.5, 1.0, 2.3)), st.sampled_from((0.0, 0.4, 1.0, 1.23, 6.0)))
MODELS = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B")


@st.composite
def shapes(draw: st.DrawFn, most: int = 130) -> tuple[int, int, int]:
    """Layers, stages and chunks."""
    stages, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return draw(st.integers(stages * chunks, max(most, stages * chunks))), stages, chunks


@given(shapes(), ENDS)
def test_each_layer_lies_on_one_chunk_in_order(shape: tuple[int, int, int], ends: tuple[float, float]) -> None:
    layers, n_stages, chunks = shape
    found = balanced_stages(layers, n_stages, chunks, ends)
    assert stages_fault(found, layers, n_stages, chunks) == ""
    ranges = layer_ranges(found)
    turns = chain.from_iterable(zip(*ranges, strict=True))  # chunk 0 of every stage, then chunk 1
    assert [layer for one in turns for layer in one] == list(range(layers))
    assert [[len(one) for one in stage] for stage in ranges] == [list(stage) for stage in found]


def ways(layers: int, stages: int, least: int) -> Iterator[tuple[int, ...]]:
    """Every way to give layers to stages."""
    if stages == 1:
        yield (layers,)
        return
    for first in range(least, layers - least * (stages - 1) + 1):
        yield from ((first, *rest) for rest in ways(layers - first, stages - 1, least))


@given(st.integers(1, 4), st.integers(1, 2), st.integers(0, 8), ENDS)
def test_no_other_way_has_a_cheaper_fullest_stage(
    stages: int, chunks: int, more: int, ends: tuple[float, float]
) -> None:
    layers = stages * chunks + more
    found = fullest_stage(balanced_stages(layers, stages, chunks, ends), ends)
    best = min(fullest_stage(tuple((n,) for n in way), ends) for way in ways(layers, stages, chunks))
    assert found == pytest.approx(best)


@given(shapes(), ENDS)
def test_chunks_are_even_and_do_not_move_layers_to_other_stages(
    shape: tuple[int, int, int], ends: tuple[float, float]
) -> None:
    layers, stages, chunks = shape
    plain, cut = balanced_stages(layers, stages, 1, ends), balanced_stages(layers, stages, chunks, ends)
    if min(stage_totals(plain)) >= chunks:
        assert stage_totals(cut) == stage_totals(plain)
    for number, one in enumerate(cut):
        if 0 < number < stages - 1 or ends == (0.0, 0.0):
            assert max(one) - min(one) <= 1


def test_the_head_weighs_as_much_as_its_operations() -> None:
    """Llama 3.1 70B: 8,192 x 128,256 to 855.7M of a layer; of two alike the later stage gets one more."""
    model = known("meta-llama/Llama-3.1-70B")
    assert head_layers(model, "lm") == pytest.approx(1.228, abs=1e-3)
    assert head_layers(model, "value") < 1e-4
    assert stages_of(model, "lm", Layout(DeviceMesh(0, 8), pp=8)) == (*[(10,)] * 6, (11,), (9,))
    assert stages_of(model, "lm", Layout(DeviceMesh(0, 4), pp=4), 2) == ((10, 10), (10, 10), (10, 11), (10, 9))
    assert stages_of(model, "value", Layout(DeviceMesh(0, 3), pp=3)) == ((26,), (27,), (27,))
    said = ((30,), (50,))
    assert stages_of(model, "lm", Layout(DeviceMesh(0, 2), pp=2, stages=said)) == said


@pytest.mark.parametrize(
    ("stages", "chunks", "text"),
    [
        (((5,),), 1, "1 stages have layers, pp is 2"),
        (((5,), (4, 1)), 1, "each stage needs 1 number of layers: it has 1 chunk"),
        (((5,), (5,)), 2, "each stage needs 2 numbers of layers: it has 2 chunks"),
        (((10,), (0,)), 1, "a stage without layers"),
        (((5,), (6,)), 1, "the stages have 11 layers, the model 10"),
        (((5,), (5,)), 1, ""),
    ],
)
def test_stages_that_cannot_be_are_named(stages: Stages, chunks: int, text: str) -> None:
    assert stages_fault(stages, 10, 2, chunks) == text


def test_more_chunks_than_layers_have_no_stages() -> None:
    with pytest.raises(ValueError, match="4 stages of 3 chunks are more than the 11 layers"):
        balanced_stages(11, 4, 3)


# --- seconds and bytes follow it --------------------------------------------------------------------------------------


@given(st.sampled_from(MODELS), st.integers(2, 8), st.integers(1, 3), st.booleans())
def test_bytes_are_those_of_the_fullest_stage(name: str, pp: int, tp: int, tied_head: bool) -> None:
    """Weights of each stage by itself, its layers and what it has of embedding and head: the largest sum."""
    model, role = known(name), ModelRole(dtype="bfloat16", head="lm" if tied_head else "value")
    layout = Layout(DeviceMesh(0, pp * 2**tp), tp=2**tp, pp=pp)
    embedding, routed = model.vocab * model.hidden, model.routed_params()
    layers = model.n_params(role.head) - model.head_params(role.head) - embedding - model.hidden
    head = (embedding if tied_head else model.hidden) + model.hidden  # and the last norm
    most = 0.0
    for stage, ranges in enumerate(layer_ranges(stages_of(model, role.head, layout))):
        of_a_layer = layers / model.layers + model.attention_copies(2**tp) * 2**tp
        held = sum(len(one) for one in ranges) * of_a_layer
        most = max(most, held + embedding * (stage == 0) + head * (stage == pp - 1))
    assert memory.local_params(model, role, layout) == pytest.approx(most / 2**tp, abs=2)
    assert memory.local_routed(model, role, layout) <= routed


@given(st.integers(0, 3), st.integers(2, 12))
def test_a_fuller_stage_takes_longer_and_holds_more(stage: int, more: int) -> None:
    """A plan whose stages were changed by hand is priced by them."""
    model, role = known("meta-llama/Llama-3.1-70B"), ModelRole(dtype="bfloat16", trainable=True)
    layers = [20, 20, 20, 20]
    layers[stage] += more
    layers[(stage + 1) % 4] -= more
    even, uneven = (Layout(DeviceMesh(0, 4), pp=4, stages=tuple((n,) for n in one)) for one in ([20] * 4, layers))
    one = MicroBatch(1.0, 2.0, 0.0)
    assert pipeline_seconds(one, Pipeline(uneven.stages), 8) > pipeline_seconds(one, Pipeline(even.stages), 8)
    assert memory.local_params(model, role, uneven) > memory.local_params(model, role, even)
    way = Running("none", logit_bytes=0)
    held = [memory.train_activations(model, role, one, 4096, way).total for one in (even, uneven)]
    assert stage or held[1] > held[0]
    kept = [memory.generation(model, role, one, 1 << 20).kv_cache for one in (even, uneven)]
    assert kept[1] == kept[0] * (20 + more) // 20
