"""The runtime keeps what the planner promises: its own Scheduler, on the clock, reaches the predicted period."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from realgraph.planner.options.calls import input_seconds
from realgraph.planner.options.holdings import candidate_of, group_for
from realgraph.planner.options.pricing import candidate_stream
from realgraph.planner.plan.plan import Plan
from realgraph.planner.plan.problem import Limits
from realgraph.planner.request.request import PlanRequest, kept_by
from realgraph.planner.search.assembly import events_of
from realgraph.planner.search.search import search
from realgraph.planner.search.streams import keeps_caches
from realgraph.run.planning import request_for
from realgraph.run.running import job_of
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.job import CheckpointSpec, Job
from realgraph.runtime.job.run_folder import RunFolder
from tests.plan_clock import PlanClock, Prices

ROOT = Path(__file__).parent.parent
PPO, GRPO = "configs/ppo_llama3_8b_2x8h100.yaml", "configs/gsm8k_grpo_qwen3_1.7b_8xh100.yaml"
STEPS = 42
LONG_TAIL = ["batch.max_new_tokens=6000", "batch.expected_new_tokens=700"]
CASES = [  # 8 to 128 devices; colocated, apart, and calls that pause a stream
    *((GRPO, [], staleness) for staleness in (0, 1, 4)),
    *((GRPO, LONG_TAIL, staleness) for staleness in (1, 2)),
    *((GRPO, ["params.kl_coef=0.1", "cluster.nodes=2"], staleness) for staleness in (0, 4)),
    *((PPO, [], staleness) for staleness in (0, 1, 2)),
    (PPO, ["cluster.nodes=4", *LONG_TAIL], 1),
    (PPO, ["cluster.nodes=8", "batch.groups=1024"], 0),
    (GRPO, ["cluster.nodes=16", "batch.groups=256", *LONG_TAIL], 2),
]


def planned(config: str, *overrides: str) -> tuple[PlanRequest, Plan, Job]:
    """A plan over the whole space of layouts, and the job that would run it: without evaluation and checkpoints."""
    checked = check_run(ROOT / config, [f"steps={STEPS}", "eval=null", *overrides])
    request = request_for(checked)
    plan = search(request, Limits(seconds=20.0))
    job = job_of(checked, request, plan, RunFolder(Path("/run")))
    runtime = replace(job.runtime, min_deadline_seconds=1e6)
    job = replace(job, checkpoint=CheckpointSpec(minutes=0), runtime=runtime)
    return kept_by(request, plan), plan, job


def prices_of(request: PlanRequest, plan: Plan) -> Prices | None:
    """Prices of the plan's stream, sequence by sequence; None of a synchronous plan."""
    if not request.workload.staleness:
        return None
    candidate = candidate_of(request, plan.allocations, "rollout")
    cluster = group_for(request, candidate.layout)
    stream = candidate_stream(request, "rollout", candidate, cluster)
    inputs = input_seconds(request, "rollout", candidate.layout, cluster)
    return Prices(stream, int(stream.slots), inputs, keeps_caches(request, plan, "rollout"))


@pytest.mark.parametrize(("config", "overrides", "staleness"), CASES)
def test_the_scheduler_reaches_the_predicted_period(config: str, overrides: list[str], staleness: int) -> None:
    request, plan, job = planned(config, f"staleness={staleness}", *overrides)
    seconds = events_of(request, plan).seconds
    extra = {name: value for name, value in seconds.items() if name not in plan.allocations}
    reached = PlanClock(job, extra, prices_of(request, plan)).period()
    assert reached == pytest.approx(plan.period_seconds, rel=0.01 if staleness else 0.005), plan.orders
