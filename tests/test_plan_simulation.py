"""The runtime keeps what the planner promises: its own Scheduler, on the clock, reaches the predicted period."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from realgraph.compose import check_run
from realgraph.planner.plan import Plan
from realgraph.planner.problem import Limits
from realgraph.planner.request import PlanRequest
from realgraph.planner.search.assembly import events_of
from realgraph.planner.search.search import search
from realgraph.planning import request_for
from realgraph.runtime.job import CheckpointSpec, Job
from tests.plan_clock import PlanClock

ROOT = Path(__file__).parent.parent
PPO, GRPO = "configs/ppo_llama3_8b_2x8h100.yaml", "configs/gsm8k_grpo_qwen3_1.7b_8xh100.yaml"
STEPS = 90


def planned(config: str, *overrides: str) -> tuple[PlanRequest, Plan, Job]:
    """A plan over the whole space of layouts, and the job that would run it: without evaluation and checkpoints."""
    checked = check_run(ROOT / config, [f"steps={STEPS}", "eval=null", *overrides])
    request = replace(request_for(checked), engine="any")
    plan = search(request, Limits(seconds=20.0))
    run = checked.run
    job = Job(
        name="test",
        graph=checked.graph,
        plan=plan,
        cluster=request.cluster,
        data=run.data,
        batch=replace(run.batch, groups=64),
        steps=STEPS,
        seed=0,
        run_dir="/run",
        user_dir="/user",
        staleness=run.staleness,
        checkpoint=CheckpointSpec(),
        runtime=replace(run.runtime, min_deadline_seconds=1e6),
    )
    return request, plan, job


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (GRPO, []),
        (GRPO, ["params.kl_coef=0.1", "cluster.nodes=2"]),
        (PPO, []),
        (PPO, ["cluster.nodes=8", "batch.groups=1024"]),
    ],
)
def test_the_scheduler_reaches_the_predicted_period(config: str, overrides: list[str], staleness: int) -> None:
    request, plan, job = planned(config, f"staleness={staleness}", *overrides)
    seconds = events_of(request, plan).seconds
    extra = {name: value for name, value in seconds.items() if name not in plan.allocations}
    reached = PlanClock(job, extra).period()
    # a stream may have any number of sequences in flight, the planner's options have some
    assert reached == pytest.approx(plan.period_seconds, rel=0.02 if staleness else 0.005), plan.orders
