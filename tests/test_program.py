"""Places of a graph's calls: on which workers each runs."""

import pytest

from realgraph.graphs.graph import Graph
from realgraph.graphs.spec import Function, Generate, Inference
from realgraph.runtime.scheduler.program import GROUP_OWNER, CallPlan, make_program
from tests.shapes import Row, Shape, build_graph, graph_of, job_of


def late_function(graph: Graph, shape: Shape) -> tuple[CallPlan, tuple[int, ...]]:
    """A function that needs an inference call's results, and the workers that make groups."""
    program = make_program(job_of(shape, graph=graph), range(shape.n_workers))
    assert program.calls["shape"].kind == "late"
    return program.calls["shape"], program.owner_workers


@pytest.mark.parametrize("staleness", [0, 1])
def test_functions_that_need_a_whole_batch_run_where_training_does(staleness: int) -> None:
    shape = Shape(n_workers=4, split=True, staleness=staleness, late="group")
    call, owners = late_function(graph_of(shape), shape)
    assert owners == (0, 1)
    assert call.ranks == ((2,), (3,)) and call.workers == (2, 3)
    assert call.whole_groups
    advantage = make_program(job_of(shape), range(4)).calls["advantage"]
    assert "shaped" in advantage.reads["shape"] and "shaped" not in advantage.reads[GROUP_OWNER]


def test_without_training_they_run_where_samples_are_written_down() -> None:
    rows: list[Row] = [
        ("rollout", Generate("actor", n=2), ("prompt",), ("tokens", "mask", "behaviour_logprobs", "versions", "text")),
        ("scores", Inference("judge", "scores", ("score",)), ("tokens",), ("score",)),
        ("shape", Function("shape"), ("score", "text"), ("shaped",)),
    ]
    shape = Shape(n_workers=4, split=True)
    call, owners = late_function(build_graph(rows, ("prompt",), 2), shape)
    assert owners == (0, 1)
    assert call.ranks == () and call.workers == owners
    assert call.reads == {GROUP_OWNER: ("text",), "scores": ("score",)}
