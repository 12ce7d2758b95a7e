"""A check of machines on the screen: a table a host, one of the pairs, and each finding with its fix."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from realgraph.planner.report.format import counted, rate_text, seconds_text
from realgraph.runtime.doctor.checks import gpus_text
from realgraph.runtime.doctor.facts import UNLIMITED, DoctorReport, HostReport, PairReport
from realgraph.screen.terminal import Terminal


def show(report: DoctorReport, console: Terminal) -> None:
    """Print all of it."""
    for host in report.hosts:
        console.print(_host_table(host))
        console.print()
    if report.pairs:
        console.print(_pair_table(report.pairs))
        console.print()
    for finding in report.findings:
        head = Text("problem" if finding.fails else "warning", style="red" if finding.fails else "yellow")
        console.print(head + Text(f": {finding.where}: {finding.text}"), soft_wrap=True)
        console.print(f"  fix: {finding.fix}", soft_wrap=True)
    fatal = sum(finding.fails for finding in report.findings)
    console.print(f"{counted(fatal, 'problem')}, {counted(len(report.findings) - fatal, 'warning')}")


def _host_table(host: HostReport) -> Table:
    place = f" on {host.network.interface}" if host.network.interface else ""
    table = Table(title=f"{host.name}: {host.network.address}{place}", title_justify="left", show_header=False)
    for row in _host_rows(host):
        table.add_row(*row)
    return table


def _host_rows(host: HostReport) -> Iterator[tuple[str, str]]:
    machine, torch, limits, disk = host.machine, host.torch, host.limits, host.disk
    yield "versions", ", ".join(f"{name} {version}" for name, version in host.versions.items())
    if torch is not None:
        yield "CUDA, NCCL", f"{torch.cuda}, {torch.nccl}" if torch.cuda else "torch is a CPU build"
    yield "devices", f"{gpus_text(host)}, {counted(machine.cores, 'core')}"
    yield "memory", f"{_gb(machine.host_memory_bytes)}, {_gb(host.available_bytes)} of it free"
    yield "/dev/shm", f"{_gb(host.shm_bytes)}, {_gb(host.shm_free_bytes)} of it free"
    locked = "unlimited" if limits.locked_bytes == UNLIMITED else f"{limits.locked_bytes / 1e6:,.0f} MB"
    yield (
        "limits",
        f"open files {_limit(limits.open_files)}, processes {_limit(limits.processes)}, locked memory {locked}",
    )
    ports = f", {host.network.ports:,} ports" if host.network.ports else ""
    yield "network", f"fails: {host.network.error}" if host.network.error else f"listens and answers{ports}"
    written = (
        f"{_gb(disk.free_bytes)} free of {_gb(disk.total_bytes)}, takes {rate_text(disk.write_bytes_per_s / 1e9)} GB/s"
    )
    yield "disk", f"{disk.folder}: {disk.error or written}"
    if abs(host.clock_ahead_seconds) >= 1e-3:
        side = "ahead" if host.clock_ahead_seconds > 0 else "behind"
        yield "clock", f"{seconds_text(abs(host.clock_ahead_seconds))} {side}"


def _pair_table(pairs: tuple[PairReport, ...]) -> Table:
    table = Table("from", "to", "by", title="pairs", title_justify="left")
    for heading in ("GB/s there", "GB/s back", "latency"):
        table.add_column(heading, justify="right")
    for pair in pairs:
        if pair.error:
            table.add_row(pair.first, pair.second, pair.backend, "fails", "fails", "")
            continue
        speeds = (f"{speed / 1e9:.3g}" for speed in (pair.there_bytes_per_s, pair.back_bytes_per_s))
        table.add_row(pair.first, pair.second, pair.backend, *speeds, seconds_text(pair.latency_seconds))
    return table


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"


def _limit(number: int) -> str:
    return "unlimited" if number == UNLIMITED else f"{number:,}"
