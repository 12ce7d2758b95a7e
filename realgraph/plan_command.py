"""`realgraph plan`: the allocation table of a run, or the plan as JSON. Imports no torch and answers at once."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from realgraph.compose import Checked, check_run
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import Generate
from realgraph.planner.codec import plan_to_json
from realgraph.planner.events import show_circuit
from realgraph.planner.memory import usable_bytes
from realgraph.planner.plan import Allocation, Plan
from realgraph.planner.request import PlanRequest
from realgraph.planning import plan_for, read_plan, request_for

GB = 1e9
PIPE_WIDTH = 120
COLUMNS = ("call", "devices", "dp/tp/pp", "weights", "tokens", "seconds", "share", "GB", "most of it")
RIGHT = ("tokens", "seconds", "share", "GB")


def plan_command(
    file: Path,
    overrides: Sequence[str] = (),
    json_out: bool = False,
    out: Path | None = None,
    edited: Path | None = None,
) -> Plan:
    """Plan the run in `file` and print the plan; write it to `out` as well. `edited`: judge this plan instead.

    Raises ConfigError with every problem of the run file, the cluster, or the edited plan.
    """
    checked = check_run(file, overrides)
    request = request_for(checked)
    plan = plan_for(checked, request) if edited is None else read_plan(edited, request)
    text = plan_to_json(plan)
    if out is not None:
        _write(out, text)
    if json_out:
        print(text, end="")
    else:
        print_plan(plan, checked, request, _console())
    return plan


def _console() -> Console:
    """A terminal at its own width; files and pipes get room for the whole table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_plan(plan: Plan, checked: Checked, request: PlanRequest, console: Console) -> None:
    """Header, allocation table and bottleneck."""
    for line in header(plan, checked, request):
        console.print(line, soft_wrap=True)
    console.print(allocation_table(plan, request))
    if plan.bottleneck:
        console.print(f"[bold]bottleneck[/] {escape(show_circuit(plan.bottleneck))}", soft_wrap=True)


def header(plan: Plan, checked: Checked, request: PlanRequest) -> list[str]:
    """Lines that say what was planned, how fast it is, and how good that is."""
    cluster, workload = request.cluster, request.workload
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} x {cluster.devices_per_node} {cluster.kind}"
    memory = f"{cluster.memory_bytes / GB:.0f} GB each, {usable_bytes(cluster) / GB:.1f} usable"
    mode = f"staleness {workload.staleness}" if workload.staleness else "synchronous"
    samples = f"{workload.groups} groups x {workload.samples_per_group}"
    prompts = workload.prompt_tokens if workload.mean_prompt_tokens is None else workload.mean_prompt_tokens
    lengths = (
        f"prompts of {prompts:.0f} (at most {workload.prompt_tokens}) and "
        f"{workload.mean_new_tokens:.0f} (at most {workload.max_new_tokens}) new tokens expected"
    )
    rate = workload.n_samples / plan.period_seconds if plan.period_seconds > 0 else 0.0
    roles = request.graph.models.items()
    sizes = ", ".join(f"{name} {_size(request.models[name].n_params(role.head))}" for name, role in roles)
    return [
        f"[bold]{escape(checked.name)}[/]: graph {escape(request.graph.name)}, {samples} samples, {lengths}, {mode}",
        f"[bold]models[/] {escape(sizes)}",
        f"[bold]cluster[/] {nodes} ({memory})",
        f"[bold]period[/] {_seconds(plan.period_seconds)} a step, {rate:.3g} samples/s (predicted, not measured)",
        f"[bold]lower bound[/] {_seconds(plan.lower_bound_seconds)}, gap {plan.gap:.1%}, within: {escape(plan.scope)}",
    ]


def allocation_table(plan: Plan, request: PlanRequest) -> Table:
    """One row per mesh-holding call, in the graph's order; memory of the fullest device while the call runs."""
    table = Table(title="allocation", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in RIGHT else "left")
    for name in request.mesh_calls:
        table.add_row(*_row(name, plan.allocations[name], plan))
    notes = ["tokens: of a micro-batch"]
    if any(isinstance(request.graph.calls[name], Generate) for name in request.mesh_calls):
        notes.append("of the cache where a call generates")
    if any(allocation.residency == "reallocated" for allocation in plan.allocations.values()):
        notes.append("copy: refreshed from the trained weights every step")
    table.caption, table.caption_justify = "; ".join(notes), "left"
    return table


def _row(name: str, allocation: Allocation, plan: Plan) -> list[str]:
    layout, mesh = allocation.layout, allocation.layout.mesh
    devices = str(mesh.first) if mesh.n_devices == 1 else f"{mesh.first}-{mesh.first + mesh.n_devices - 1}"
    share = allocation.seconds / plan.period_seconds if plan.period_seconds > 0 else 0.0
    return [
        escape(name),
        devices,
        f"{layout.dp}/{layout.tp}/{layout.pp}",
        layout.sharding if allocation.residency == "resident" else f"{layout.sharding} copy",
        f"{allocation.max_tokens_per_microbatch:,}",
        _seconds(allocation.seconds).removesuffix(" s"),
        f"{share:.0%}",
        f"{allocation.peak_bytes / GB:.2f}",
        allocation.worst_term.replace("_", " "),
    ]


def _size(n_params: int) -> str:
    return f"{n_params / 1e9:.3g}B" if n_params >= 1e8 else f"{n_params / 1e6:.3g}M"


def _seconds(seconds: float) -> str:
    """Three significant digits."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:#.3g} s"


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "give --out a file in a folder that exists"
        raise ConfigError([Problem(Where(str(out)), f"can't write the plan: {error.strerror}", hint, "out")]) from error
