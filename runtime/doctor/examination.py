"""A whole check of machines: this one, or hosts that join. Nothing that is wrong is raised: the report says it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from realgraph.runtime.doctor.checks import findings
from realgraph.runtime.doctor.facts import DoctorReport, Finding, HostReport, Network, PairReport
from realgraph.runtime.doctor.hosts import JoinedHosts, Terms
from realgraph.runtime.doctor.probes import look
from realgraph.runtime.doctor.session import PROGRAM, CheckMaster, Examination, examine, measure
from realgraph.runtime.hosts.starter import AgentStarter
from realgraph.runtime.processes.launcher import Fleet, LaunchError
from realgraph.runtime.processes.local import LocalLauncher

LOAD_SECONDS = 60.0  # for this host to load torch
_LOAD_FIX = "python -c 'import torch' must work: install its build for this machine again"
_HOST_FIX = "see what its agent printed, and that it can be reached on all ports of this network"
_JOIN_FIX = "type `realgraph worker` on each host; what it prints there says why it does not join"


def report(hosts: Sequence[HostReport], pairs: Sequence[PairReport], others: Sequence[Finding] = ()) -> DoctorReport:
    """The facts, with all that is wrong. others: findings that no fact shows."""
    return DoctorReport(tuple(hosts), tuple(pairs), tuple(findings(hosts, pairs, others)))


async def check_here(name: str, network: Network, folder: Path) -> DoctorReport:
    """This host, and two processes of it that talk over its address."""
    master = CheckMaster(2, network.address)
    try:
        fleet = await LocalLauncher(network.address).start(master.boots(), PROGRAM, LOAD_SECONDS)
    except LaunchError as error:
        await master.close()
        text = f"torch can't be loaded: {str(error).strip().splitlines()[-1]}"
        return report([look(name, network, folder)], [], [Finding(name, text, _LOAD_FIX)])
    try:
        found, pairs = await _asked(master, fleet, {0: name}, folder, {i: f"{name}, process {i}" for i in (0, 1)})
    finally:
        await fleet.terminate(0)
        await master.close()
    silent = [Finding(name, f"its worker does not answer: {why}", _HOST_FIX) for why in found.silent.values()]
    hosts = [replace(host, clock_ahead_seconds=0.0) for host in found.hosts.values()]  # it is the same clock
    hosts = hosts or [look(name, network, folder)]
    return report(hosts, pairs, silent)


async def _asked(
    master: CheckMaster, fleet: Fleet, names: Mapping[int, str], folder: Path, talking: Mapping[int, str]
) -> tuple[Examination, list[PairReport]]:
    """The hosts by one worker of each, and all pairs of those workers that talk."""
    master.watch(fleet)
    found = await examine(master, names, folder)
    talking = {worker: name for worker, name in talking.items() if worker not in found.silent}
    pairs = await measure(master, talking, "gloo")
    if all(host.torch is not None and host.torch.n_gpus * len(names) > 1 for host in found.hosts.values()):
        pairs += await measure(master, talking, "nccl")
    return found, pairs


async def check_hosts(terms: Terms, starter: AgentStarter, folder: Path, say: Callable[[str], None]) -> DoctorReport:
    """Hosts that join, and all pairs of them. Raises LaunchError where nothing can listen for them."""
    joined = JoinedHosts(terms, starter, say)
    others: list[Finding] = []
    master: CheckMaster | None = None
    try:
        await joined.join()
        names = [host.facts.name for host in joined.hosts]
        if joined.missing:
            text = f"{len(names)} of {terms.n_hosts} have joined ({', '.join(names) or 'none'}): {joined.missing}"
            others.append(Finding("hosts", text, _JOIN_FIX))
        if not names:
            return report([], [], others)
        master = CheckMaster(len(names), terms.address)
        failed = await joined.launch(master.boots())
        alive = {i: name for i, name in enumerate(names) if i not in failed}
        found, pairs = await _asked(master, joined.fleet, alive, folder, alive)
    finally:
        await joined.fleet.terminate(0)
        if master is not None:
            await master.close()
    others += [Finding(joined.hosts[i].text, why, _HOST_FIX) for i, why in sorted((failed | found.silent).items())]
    return report([found.hosts[i] for i in sorted(found.hosts)], pairs, others)
