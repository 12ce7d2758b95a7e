"""`realgraph profile`: measure this machine, and write what the planner's factors are on it."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.planner.costs.calibrate.fit_profile import Profiled, Stage, phase_errors, profiled
from realgraph.planner.costs.calibrate.measurements import HostLink, Measured, ProfileTask, cases_of
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec
from realgraph.planner.inputs.detect import probe
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.request.cost_table import CostTable, costs_to_json
from realgraph.profile.runs import overheads
from realgraph.profile.sglang import open_server, sglang_costs
from realgraph.run.requests import cluster_of
from realgraph.run_file.compose import check_run
from realgraph.runtime.job.run_folder import write_atomic
from realgraph.runtime.profile.launch import measure
from realgraph.screen.files import COSTS, refuse_unwritable
from realgraph.screen.terminal import Terminal

ROUNDS, QUICK_ROUNDS = 9, 3
PROCESSES_PER_CORE = 4  # with more, turns on a core are all that is measured
BUSY_SPREAD = 0.25  # of repeats: more than an idle machine shows
LINKS = {
    "link": "all-reduce",
    "gather": "all-gather",
    "scatter": "reduce-scatter",
    "exchange": "all-to-all",
    "p2p": "message between two",
}
RATES = {"gemm": "matrix products", "attention": "attention", "memory": "memory", "kv": "cache", **LINKS}
MEANINGS = {
    "step_seconds": "a decode step",
    "layer_seconds": "a layer in a decode step",
    "sequence_seconds": "a sequence in a decode step",
    "admission_seconds": "a sample that generation takes in",
    "pass_layer_seconds": "a layer in a forward pass",
    "microbatch_seconds": "a micro-batch of training",
    "optimizer_step_seconds": "an optimizer step",
    "collective_seconds": "a round of an all-reduce",
    "gather_seconds": "an all-gather",
    "scatter_seconds": "a reduce-scatter",
    "exchange_seconds": "an all-to-all",
    "p2p_seconds": "a message between two",
    "call_seconds": "a call",
    "sample_seconds": "a sample in a call",
    "function_seconds": "a sample in a function's process",
}


class ProfileRequest(Struct, frozen=True):
    """A request to measure."""

    file: Path | None = None  # a run whose machine it is; None: this machine
    overrides: tuple[str, ...] = ()  # of that run
    devices: int | None = None  # of this machine; None: all
    quick: bool = False  # fewer repeats
    sglang: str | None = None  # URL of a running server, whose decode steps then stand for the embedded engine's


def profile_command(asked: ProfileRequest, out: Path) -> CostTable:
    """Measure, write the table to `out`, and print what was found. Raises ConfigError."""
    console = Terminal()
    cluster, dtype = machine_of(asked)
    refuse_unwritable(out, COSTS)  # minutes of measuring should not end there
    console.print(
        f"measuring {cluster.devices_per_node} x {cluster.kind} in {dtype}, all at once: a few minutes at most"
    )
    served = None if asked.sglang is None else open_server(asked.sglang)  # to refuse it before minutes of work
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    measured = measure(ProfileTask(cases_of(cluster), cluster, dtype, rounds))
    profile = with_overheads(profiled(measured, cluster, dtype), cluster, dtype)
    if served is not None:
        costs, stage = sglang_costs(profile.costs, served, cluster)
        profile = Profiled(costs, (*profile.stages, stage))
    table = CostTable(
        kind=cluster.kind,
        name=platform.node(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        factors=profile.costs,
        phases=phase_errors(profile.stages),
    )
    write_atomic(out, costs_to_json(table))
    print_profile(profile, measured, cluster, console)
    console.print(f"written: {out}; use it: realgraph plan FILE --costs {out}", soft_wrap=True)
    return table


def with_overheads(kernels: Profiled, cluster: Cluster, dtype: DType) -> Profiled:
    """The same with what the runtime's own short runs tell."""
    costs, stage = overheads(kernels.costs, cluster, dtype)
    return Profiled(costs, (*kernels.stages, stage))


def machine_of(asked: ProfileRequest) -> tuple[Cluster, DType]:
    """One node of the cluster and the dtype to measure in. Raises ConfigError where this machine is not such a node."""
    if asked.file is None:
        if asked.overrides:
            raise _error("overrides need a run file", "realgraph profile FILE PATH=VALUE ...")
        cluster = cluster_of(ClusterSpec(devices=asked.devices))
        _refuse_beyond(cluster, "asked for are", "leave --devices out")
        return cluster, "float32" if cluster.is_cpu else "bfloat16"
    checked = check_run(asked.file, asked.overrides)
    spec = checked.run.cluster
    cluster = cluster_of(ClusterSpec(devices=asked.devices or spec.devices, kind=spec.kind, memory_gb=spec.memory_gb))
    _refuse_beyond(cluster, "the run's nodes have", "measure on a node of the run's cluster")
    dtypes: set[DType] = {role.dtype for role in checked.graph.models.values()}
    return cluster, dtypes.pop() if len(dtypes) == 1 else "bfloat16"


def _refuse_beyond(cluster: Cluster, who: str, hint: str) -> None:
    """Raises ConfigError for more devices than this machine has; CPU processes may share its cores up to a point."""
    machine, devices = probe(), cluster.devices_per_node
    if not cluster.is_cpu:
        if len(machine.gpus) < devices:
            raise _error(f"{who} {devices} {cluster.kind}, this machine has {len(machine.gpus)} GPUs", hint)
    elif devices > PROCESSES_PER_CORE * machine.cores:
        most = PROCESSES_PER_CORE * machine.cores
        text = f"{who} {devices} processes; {machine.cores} cores can be shared by {most} at most"
        raise _error(text, f"--devices {machine.cores} gives each a core of its own")


def _error(text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where("profile"), text, hint, "profile")])


# --- what is shown ----------------------------------------------------------------------------------------------------


def print_profile(profile: Profiled, measured: Sequence[Measured], cluster: Cluster, console: Terminal) -> None:
    """The factors beside the shipped ones, the fixed seconds, and how well they meet the measurements."""
    console.print(_rates(profile.costs, measured, cluster))
    console.print(_seconds(profile.costs, cluster))
    console.print(_stages(profile.stages))
    spread = sorted(one.spread for one in measured)[len(measured) // 2]
    console.print(f"repeats of one case differ by {spread:.0%} in the median; the least seconds count")
    if spread > BUSY_SPREAD:
        console.print(Text("the machine was busy with other work: measure again when it is not", style="yellow"))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _rates(costs: EfficiencyFactors, measured: Sequence[Measured], cluster: Cluster) -> Table:
    """Reached rates in the units of a data sheet; of the host link both directions, whose factor is one."""
    shipped = device_kind(cluster.kind).costs
    peaks = {
        "gemm": (cluster.flops / 1e12, "TFLOP/s"),
        "attention": (cluster.flops / 1e12, "TFLOP/s"),
        "memory": (cluster.memory_bytes_per_s / 1e9, "GB/s"),
        "kv": (cluster.memory_bytes_per_s / 1e9, "GB/s"),
        **dict.fromkeys(LINKS, (cluster.link_bytes_per_s / 1e9, "GB/s")),
    }
    table = _table("rate", "reached", "of the peak", "shipped factor")
    for name, what in RATES.items():
        share, before = (float(asdict(one)[name]) or one.link for one in (costs, shipped))
        peak, unit = peaks[name]
        table.add_row(what, f"{share * peak:.3g} {unit}", f"{share:.2f}", f"{before:.2f}")
    for one in measured:
        if isinstance(one.case, HostLink):
            rate, what = one.case.nbytes / one.seconds, "to the device" if one.case.to_device else "to the host"
            table.add_row(
                f"copies {what}",
                f"{rate / 1e9:.3g} GB/s",
                f"{rate / cluster.pcie_bytes_per_s:.2f}",
                f"{shipped.host:.2f}",
            )
    return table


def _seconds(costs: EfficiencyFactors, cluster: Cluster) -> Table:
    shipped = asdict(device_kind(cluster.kind).costs)
    table = _table("fixed time of", "measured", "shipped")
    for name, what in MEANINGS.items():
        value, before = asdict(costs)[name], shipped[name]
        table.add_row(what, _micro(value), _micro(before))
    return table


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"


def _stages(stages: Sequence[Stage]) -> Table:
    table = _table("what was measured", "cases", "formulas miss them by")
    for stage in stages:
        table.add_row(stage.name, str(stage.count), f"{stage.error:.0%}")
    return table
