"""A Slurm of two nodes on one machine, as Debian packages it: each node is a network namespace. Linux, as root.

The packages are fetched and unpacked, not installed, by `python -m tests.slurm_cluster FOLDER` (`make test-hosts`).
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.namespaces import Network

PACKAGES = (
    *("munge", "libmunge2", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libhwloc15", "liblua5.1-0"),
)
LIBRARIES = "usr/lib/x86_64-linux-gnu"
READY_SECONDS = 30.0


def fetch(folder: Path) -> None:
    """Download and unpack the packages of a Slurm. Raises CalledProcessError, OSError."""
    if (folder / "usr/sbin/slurmctld-wlm").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    debs = folder / "debs"
    debs.mkdir(parents=True)
    words = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
    try:
        subprocess.run(words, cwd=debs, check=True, capture_output=True)
    except subprocess.CalledProcessError:
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
        subprocess.run(words, cwd=debs, check=True, capture_output=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(folder)], check=True)
    shutil.rmtree(debs)


def root_of_slurm() -> Path:
    """The folder that `fetch` unpacks to."""
    return Path(sys.prefix) / "slurm"


@dataclass(frozen=True)
class Slurm:
    """A controller and a node in each namespace, and how to call its commands."""

    root: Path
    state: Path
    network: Network

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its commands need."""
        libraries = f"{self.root / LIBRARIES}:{self.root / LIBRARIES / 'slurm-wlm'}"
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PATH": f"{self.root / 'usr/bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": libraries,
            "SLURM_CONF": str(self.state / "slurm.conf"),
        }

    def words(self, *command: str, node: int = 0) -> list[str]:
        """A command, to be run on a node."""
        return ["nsenter", f"--net=/run/netns/{self.network.spaces[node]}", *command]

    def call(self, *command: str, node: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        words = self.words(*command, node=node)
        return subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=180, check=False
        )

    def until(self, job: str, states: Sequence[str], seconds: float) -> dict[str, str]:
        """The fields of a job once it is in one of these states."""
        last = time.monotonic() + seconds
        while True:
            text = self.call("scontrol", "--oneliner", "show", "job", job).stdout
            pairs = [word.partition("=") for word in text.split() if "=" in word]
            fields = {name: value for name, _, value in pairs}
            if fields.get("JobState") in states:
                return fields
            assert time.monotonic() < last, text
            time.sleep(0.2)


@contextmanager
def slurm(network: Network, state: Path) -> Iterator[Slurm]:
    """A Slurm over the namespaces of a network; ended afterwards with all that its jobs left."""
    root = root_of_slurm()
    made = Slurm(root, state, network)
    for name in ("ctld", *(f"spooln{i}" for i in range(len(network.spaces)))):
        (state / name).mkdir(parents=True)
    (state / "munge.key").write_bytes(os.urandom(1024))
    (state / "munge.key").chmod(0o600)
    (state / "slurm.conf").write_text(_conf(made))
    with ExitStack() as stack:
        sbin = root / "usr/sbin"
        munged = [str(sbin / "munged"), "--foreground", "--force", f"--key-file={state / 'munge.key'}"]
        munged += [f"--socket={state / 'munge.socket'}", f"--pid-file={state / 'munged.pid'}"]
        munged += [f"--log-file={state / 'munged.log'}", f"--seed-file={state / 'munged.seed'}"]
        commands = [munged, made.words(str(sbin / "slurmctld-wlm"), "-c", "-D", "-f", str(state / "slurm.conf"))]
        for number in range(len(network.spaces)):
            words = [str(sbin / "slurmd-wlm"), "-D", "-N", f"n{number}", "-f", str(state / "slurm.conf")]
            commands.append(made.words(*words, "-d", str(sbin / "slurmstepd-wlm"), node=number))
        for number, words in enumerate(commands):
            log = stack.enter_context((state / f"daemon{number}.log").open("wb"))
            daemon = subprocess.Popen(
                words, env=made.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
            if number == 0:
                _wait((state / "munge.socket").exists, "munged")
        _wait(lambda: made.call("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(network.spaces)))
        try:
            yield made
        finally:
            made.call("scancel", "--full", "--signal=KILL", "--user=root")


def _wait(holds: Callable[[], bool], what: str = "slurmd on each node") -> None:
    last = time.monotonic() + READY_SECONDS
    while not holds():
        assert time.monotonic() < last, f"{what} is not ready"
        time.sleep(0.1)


def _conf(made: Slurm) -> str:
    state, cores = made.state, len(os.sched_getaffinity(0))
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname=n{number} NodeAddr={address} CPUs={cores} RealMemory=4000 Port=17003"
        for number, address in enumerate(made.network.addresses)
    )
    return f"""ClusterName=tests
SlurmctldHost={platform.node().partition(".")[0]}({made.network.addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state / "munge.socket"},cred_expire=5
CredType=cred/munge
CryptoType=crypto/munge
PluginDir={made.root / LIBRARIES / "slurm-wlm"}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldPort=17002
SlurmdPort=17003
StateSaveLocation={state / "ctld"}
SlurmdSpoolDir={state}/spool%n
SlurmctldPidFile={state / "slurmctld.pid"}
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state / "slurmctld.log"}
SlurmdLogFile={state}/slurmd-%n.log
KillWait=20
MinJobAge=600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else root_of_slurm())
