"""Plans on the clock: the very Scheduler over workers that take the cost model's seconds (`tests/plan_clock.py`)."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
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
from realgraph.run.requests import RequestOptions, request_for
from realgraph.run.running import job_of
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.job import CheckpointSpec, Job
from realgraph.runtime.job.run_folder import RunFolder
from tests.plan_clock import PlanClock, Prices

ROOT = Path(__file__).parent.parent
PPO, GRPO = "configs/ppo_llama3_8b_2x8h100.yaml", "configs/gsm8k_grpo_qwen3_1.7b_8xh100.yaml"
STEPS = 42
LONG_TAIL = ["batch.max_new_tokens=6000", "batch.expected_new_tokens=700"]
SEARCH_SECONDS = 20.0


class ClockedPlan(Struct, frozen=True):
    """A plan, and the job that runs it, without evaluation and checkpoints."""

    request: PlanRequest  # at the staleness that the plan keeps to
    plan: Plan
    job: Job

    @property
    def extra(self) -> dict[str, float]:
        """Seconds of free calls by name, and of reallocations by their node."""
        seconds = events_of(self.request, self.plan).seconds
        return {name: value for name, value in seconds.items() if name not in self.plan.allocations}

    @property
    def prices(self) -> Prices | None:
        """Prices of the plan's stream, sequence by sequence; None of a synchronous plan."""
        request, plan = self.request, self.plan
        if not request.workload.staleness:
            return None
        candidate = candidate_of(request, plan.allocations, "rollout")
        cluster = group_for(request, candidate.layout)
        stream = candidate_stream(request, "rollout", candidate, cluster)
        inputs = input_seconds(request, "rollout", candidate.layout, cluster)
        slots = plan.allocations["rollout"].most_running
        return Prices(stream, slots, inputs, keeps_caches(request, plan, "rollout"))

    @property
    def lean(self) -> "ClockedPlan":
        """The same without what is spare: its engines run as many sequences at once as it expects, and no more."""
        rollout = replace(self.plan.allocations["rollout"], spare_running=0)
        plan = replace(self.plan, allocations={**self.plan.allocations, "rollout": rollout})
        return replace(self, plan=plan, job=replace(self.job, plan=plan))

    def clock(self, *, limited: bool = True) -> PlanClock:
        """A run of it that has not begun. limited: in the work in flight, besides the rule of admission."""
        return PlanClock(self.job, self.extra, self.prices, limited=limited)


def planned(
    config: str, *overrides: str, asked: RequestOptions = RequestOptions(), levels: Sequence[int] = ()
) -> ClockedPlan:
    """The best plan that the search finds of a run file with these overrides. levels: of staleness, see `search`."""
    checked = check_run(ROOT / config, [f"steps={STEPS}", "eval=null", *overrides])
    request = request_for(checked, asked=asked)
    plan = search(request, Limits(seconds=SEARCH_SECONDS), levels)
    job = job_of(checked, request, plan, RunFolder(Path("/run")))
    runtime = replace(job.runtime, min_deadline_seconds=1e6)
    job = replace(job, checkpoint=CheckpointSpec(minutes=0), runtime=runtime)
    return ClockedPlan(kept_by(request, plan), plan, job)


def verdict(*, passed: bool) -> str:
    return "PASS" if passed else "FAIL"
