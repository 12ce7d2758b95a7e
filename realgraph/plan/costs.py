"""The measured costs that a plan is made with: those of `--costs`, or those of the run that `--run` names."""

from msgspec import Struct

from realgraph.plan.options import PlanOptions
from realgraph.planner.request.cost_table import COSTS_FILE, CostTable, load_costs
from realgraph.runtime.job.run_folder import RunFolder


class PlanCosts(Struct, frozen=True):
    """A table of measured costs, the option and the file or directory that it comes from, and words on that for the
    head of a plan; all empty where no option asks for one."""

    table: CostTable = CostTable()
    option: str = ""
    source: str = ""
    text: str = ""


def costs_for(options: PlanOptions) -> PlanCosts:
    """The table of `--costs`, which goes first, or the one that the run of `--run` has left. Raises ConfigError.

    A run that still runs, or was killed, has left none: it is only compared.
    """
    run = options.run_dir
    if options.costs is not None:
        compared = f"; the run in {run} is only compared, since --costs is given" if run is not None else ""
        text = f"measured, from {options.costs}{compared}"
        return PlanCosts(load_costs(options.costs), "--costs", str(options.costs), text)
    if run is None:
        return PlanCosts()
    if not RunFolder(run).costs.is_file():
        text = f"the shipped ones: the run in {run} has left no {COSTS_FILE}, which a run writes at its end"
        return PlanCosts(text=f"{text}, and is only compared")
    return PlanCosts(load_costs(run), "--run", str(run), f"measured by the run in {run}")
