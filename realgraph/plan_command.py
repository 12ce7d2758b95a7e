"""`realgraph plan`: the allocation table of a run, or the plan as JSON. Imports no torch and answers at once."""

from collections.abc import Sequence
from pathlib import Path

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
        print_plan(plan, checked, request, Console(highlight=False))
    return plan


def print_plan(plan: Plan, checked: Checked, request: PlanRequest, console: Console) -> None:
    """Header, allocation table and bottleneck."""
    for line in header(plan, checked, request):
        console.print(line)
    console.print(allocation_table(plan, request))
    if plan.bottleneck:
        console.print(f"[bold]bottleneck[/] {escape(show_circuit(plan.bottleneck))}")


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
    return [
        f"[bold]{escape(checked.name)}[/]: graph {escape(request.graph.name)}, {samples} samples, {lengths}, {mode}",
        f"[bold]cluster[/] {nodes} ({memory})",
        f"[bold]period[/] {_seconds(plan.period_seconds)} a step, {rate:.3g} samples/s (predicted, not measured)",
        f"[bold]lower bound[/] {_seconds(plan.lower_bound_seconds)}, gap {plan.gap:.1%}, within: {escape(plan.scope)}",
    ]


def allocation_table(plan: Plan, request: PlanRequest) -> Table:
    """One row per mesh-holding call, in the graph's order."""
    table = Table(title="allocation", title_justify="left", title_style="bold")
    for name in (
        "call",
        "model",
        "devices",
        "dp",
        "tp",
        "pp",
        "sharding",
        "tokens",
        "seconds",
        "share",
        "memory",
        "most of it",
    ):
        table.add_column(
            name, justify="right" if name in ("dp", "tp", "pp", "tokens", "seconds", "share", "memory") else "left"
        )
    for name in request.mesh_calls:
        table.add_row(*_row(name, plan.allocations[name], plan, request))
    has_cache = any(isinstance(request.graph.calls[name], Generate) for name in request.mesh_calls)
    table.caption = "tokens: of a micro-batch" + ("; of the cache, for generate calls" if has_cache else "")
    return table


def _row(name: str, allocation: Allocation, plan: Plan, request: PlanRequest) -> list[str]:
    layout, mesh = allocation.layout, allocation.layout.mesh
    devices = str(mesh.first) if mesh.n_devices == 1 else f"{mesh.first}-{mesh.first + mesh.n_devices - 1}"
    billions = request.model(name).n_params(request.role(name).head) / 1e9
    size = f"{billions:.3g}B" if billions >= 0.1 else f"{billions * 1e3:.3g}M"
    share = allocation.seconds / plan.period_seconds if plan.period_seconds > 0 else 0.0
    sharding = layout.sharding if allocation.residency == "resident" else f"{layout.sharding}, {allocation.residency}"
    return [
        escape(name),
        escape(f"{request.graph.role(name)} {size}"),
        devices,
        str(layout.dp),
        str(layout.tp),
        str(layout.pp),
        sharding,
        f"{allocation.max_tokens_per_microbatch:,}",
        _seconds(allocation.seconds).removesuffix(" s"),
        f"{share:.0%}",
        f"{allocation.peak_bytes / GB:.2f} GB",
        allocation.worst_term.replace("_", " "),
    ]


def _seconds(seconds: float) -> str:
    """Three significant digits."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:#.3g} s"


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "give --out a file in a folder that exists"
        raise ConfigError([Problem(Where(str(out)), f"can't write the plan: {error.strerror}", hint, "out")]) from error
