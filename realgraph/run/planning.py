"""Plans a checked run. Imports no torch."""

from pathlib import Path

from realgraph.graphs.errors import ConfigError, Problem, Where, reason
from realgraph.graphs.yaml.files import read_text
from realgraph.planner.advise.servers import with_servers
from realgraph.planner.feasibility.validate import validate
from realgraph.planner.plan.codec import plan_from_json
from realgraph.planner.plan.plan import Plan
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.search import Infeasible, reprice, search
from realgraph.planner.search.simpler import simplest
from realgraph.run.requests import placed
from realgraph.run_file.compose import Checked
from realgraph.screen.first_search import prepare_search

PLAN_HINT = "a plan is what `realgraph plan --out FILE` writes"


def plan_for(checked: Checked, request: PlanRequest) -> Plan:
    """The planner's choice. Raises ConfigError, `Infeasible` where no plan fits, placed in the user's files."""
    prepare_search()
    try:
        whole = with_servers(request).request
        return simplest(whole, search(whole))
    except Infeasible as error:
        problems = [placed(checked, problem) for problem in error.problems]
        raise Infeasible(problems, error.conflict, error.changes) from None
    except ConfigError as error:
        raise ConfigError(placed(checked, problem) for problem in error.problems) from None


def read_plan(file: Path, request: PlanRequest) -> Plan:
    """A plan that may have been edited by hand, with its predictions computed anew.

    Raises ConfigError with every reason why it can't run what `request` asks.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Problem(Where(str(file)), f"the plan can't be read: {reason(error)}", PLAN_HINT, "plan")]
        ) from error
    plan = plan_from_json(text, str(file))
    problems = validate(plan, request, str(file))
    if problems:
        raise ConfigError(problems)
    return reprice(request, plan)
