"""Predicted speeds of serving engines beside published ones, with the shipped factors as they are."""

import statistics

import pytest

from benchmarks.published_generation import generation
from realgraph.graphs.spec import ModelRole
from realgraph.planner.costs.generate.decode import cache_bytes_per_token
from realgraph.planner.costs.generate.generate import GenerateWork
from realgraph.planner.costs.setting import Setting
from realgraph.planner.plan.layout import DeviceMesh, Layout
from tests.planner_cases import cluster, eight_bit, known

# TensorRT-LLM v0.14, docs/source/performance/perf-overview.md, Llama 3.1: billions, kind, tp, fp8, prompt, response,
# output tokens a second. All requests at once; a sequence's whole length is reserved in 99 % of the free memory.
ROWS = [
    (8, "H100-SXM", 1, True, 1000, 1000, 14108.0),
    (8, "H100-SXM", 1, False, 1000, 1000, 7054.5),
    (8, "H100-SXM", 1, False, 128, 128, 15571.7),
    (8, "H100-SXM", 1, True, 2048, 2048, 8777.7),
    (8, "H100-SXM", 1, False, 500, 2000, 7498.3),
    (8, "A100-80", 1, False, 128, 2048, 4963.4),
    (8, "A100-80", 1, False, 2048, 128, 795.4),
    (8, "A100-80", 1, False, 5000, 500, 790.7),
    (70, "H100-SXM", 4, True, 128, 128, 8542.3),
    (70, "H100-SXM", 8, True, 1000, 1000, 10730.2),
    (70, "H100-SXM", 8, True, 500, 2000, 13109.4),
    (70, "H100-SXM", 2, True, 1000, 1000, 4116.4),
    (70, "A100-80", 4, False, 1000, 1000, 1762.7),
    (70, "A100-80", 8, False, 2048, 128, 550.5),
]
REQUESTS = {(128, 128): 30000, (2048, 2048): 1500, (5000, 500): 1500}


def predicted(row: tuple[int, str, int, bool, int, int, float]) -> float:
    size, kind, tp, fp8, prompt, new, _ = row
    model, machine = known(f"meta-llama/Llama-3.1-{size}B"), cluster(kind, 8)
    point = Setting(model, ModelRole(dtype="bfloat16"), Layout(DeviceMesh(0, tp), tp=tp), machine)
    if fp8:
        point = eight_bit(point, cache_bytes=1)
    room = 0.99 * (machine.memory_bytes - (1 if fp8 else 2) * model.n_params() / tp - 3e9)
    running = min(4096, int(room / cache_bytes_per_token(point) / (prompt + new)))
    requests = REQUESTS.get((prompt, new), 3000)
    work = GenerateWork(requests, 1, prompt, new, new, running)
    return generation(point, work).tokens_per_second


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}B-{row[1]}-tp{row[2]}-{row[4]}-{row[5]}-fp8{row[3]}")
def test_a_published_speed_is_within_a_fifth(row: tuple[int, str, int, bool, int, int, float]) -> None:
    assert predicted(row) == pytest.approx(row[-1], rel=0.2)


def test_the_median_error_is_below_a_tenth() -> None:
    assert statistics.median(abs(predicted(row) / row[-1] - 1) for row in ROWS) < 0.1
