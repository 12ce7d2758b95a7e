"""`realgraph doctor`: this machine, hosts that join, or an allocation of Slurm, checked before a run."""

import asyncio
import importlib.util
import ipaddress
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from realgraph.doctor.tables import show
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.yaml.document import COMMAND_LINE
from realgraph.runtime.doctor.checks import findings
from realgraph.runtime.doctor.facts import DoctorReport
from realgraph.runtime.doctor.probes import look, look_at_network, outward_address
from realgraph.runtime.processes.environment import variables
from realgraph.runtime.wire.interfaces import address_of_interface, interface_of_address
from realgraph.screen.output import say, say_json
from realgraph.screen.terminal import wide_terminal

BAD = 2
KEY_FILE = "doctor.key"
LOOPBACK = "127.0.0.1"


class DoctorRequest(Struct, frozen=True):
    """The command line. n_hosts and listen: of hosts that join. folder: for the disk, and the file of the key."""

    n_hosts: int | None
    listen: str
    slurm: bool
    interface: str
    folder: Path
    join_seconds: float
    as_json: bool
    trusted_network: bool = False  # public addresses may be listened on


def doctor_command(request: DoctorRequest) -> None:
    """Exits with 2 where a run would fail. Raises ConfigError for a mistake on the command line."""
    if request.slurm and (request.n_hosts or request.listen):
        raise _mistake("--slurm", "the hosts are those of the allocation", "leave out --hosts and --listen")
    if bool(request.n_hosts) != bool(request.listen):
        hint = "realgraph doctor --hosts 2 --listen 10.0.0.1:7000, or neither for this machine alone"
        raise _mistake("--hosts", "--hosts and --listen go together", hint)
    if not request.folder.is_dir():
        raise _mistake("--dir", f"there is no folder {request.folder}", "make it, or name the one for run directories")
    try:
        report = _over_hosts(request) if request.slurm or request.listen else _here(request)
    except ConfigError as error:
        raise ConfigError(_at_option(problem, request) for problem in error.problems) from error
    if request.as_json:
        say_json(report)
    else:
        show(report, wide_terminal())
    if not report.ok:
        sys.exit(BAD)


def _here(request: DoctorRequest) -> DoctorReport:
    address = address_of_interface(request.interface) if request.interface else outward_address()
    if is_global(address) and not request.trusted_network:
        if request.interface:
            hint = "name a private network, or add --trusted-network behind a firewall"
            raise _mistake("--interface", f"{address} is a public address, where gloo would listen", hint)
        address = LOOPBACK
    network = look_at_network(address, interface_of_address(address))
    name, folder = platform.node(), request.folder.absolute()
    if network.error or not _has("torch", "zmq"):
        host = look(name, network, folder)
        return DoctorReport((host,), (), tuple(findings([host], [])))
    from realgraph.runtime.doctor.examination import check_here

    return asyncio.run(check_here(name, network, folder))


def _over_hosts(request: DoctorRequest) -> DoctorReport:
    """Raises ConfigError where nothing can listen for the hosts."""
    if not _has("zmq"):
        raise _mistake("realgraph", "pyzmq is not installed", "pip install 'realgraph[run]'")
    from realgraph.runtime.clusters.slurm import address_towards, the_allocation
    from realgraph.runtime.clusters.srun import agents_by_srun
    from realgraph.runtime.doctor.examination import check_hosts
    from realgraph.runtime.doctor.hosts import Terms
    from realgraph.runtime.hosts.facts import split_address
    from realgraph.runtime.hosts.launcher import JoinTerms, check_listen
    from realgraph.runtime.hosts.starter import AgentStarter, StartedByHand
    from realgraph.runtime.processes.launcher import LaunchError

    note = partial(say, err=True)
    interface = request.interface or None
    starter: AgentStarter
    with tempfile.TemporaryDirectory(prefix="realgraph-doctor-") as own:
        if request.slurm:
            nodes = len((allocation := the_allocation(variables())).nodes)
            address, port = address_of_interface(interface) if interface else address_towards(allocation), 0
            starter, key_file = agents_by_srun(nodes, Path(own) / "srun.log", note), Path(own) / KEY_FILE
        else:
            assert request.n_hosts is not None
            (address, port), nodes = split_address(request.listen, "--listen"), request.n_hosts
            starter, key_file = StartedByHand(note, "to check"), request.folder.absolute() / KEY_FILE
        check_listen(JoinTerms(address, port, trusted_network=request.trusted_network), "--listen")
        terms = Terms(nodes, address, port, key_file, request.join_seconds, interface, request.trusted_network)
        try:
            return asyncio.run(check_hosts(terms, starter, request.folder.absolute(), note))
        except LaunchError as error:
            raise _mistake("--listen", str(error), "give an address of this host, and a port that is free") from None


def is_global(address: str) -> bool:
    """True of an address that the whole internet may reach."""
    return ipaddress.ip_address(address).is_global


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def _at_option(problem: Problem, request: DoctorRequest) -> Problem:
    """The same problem at the option that stands here for a setting of a run file."""
    options = {"$.launch": "--slurm" if request.slurm else "--hosts", "$.launch.interface": "--interface"}
    option = options.get(problem.where.path)
    return replace(problem, where=Where(COMMAND_LINE, path=option)) if option is not None else problem


def _mistake(path: str, text: str, hint: str) -> ConfigError:
    return ConfigError([Problem(Where(COMMAND_LINE, path=path), text, hint, "doctor")])
