"""The batch script of a run: what it says, and how it is submitted. The script ends in the run itself, which so gets
Slurm's signals."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.runtime.clusters.slurm import ASK_SECONDS

SCRIPT, LOG = "run.sbatch", "slurm-%j.log"  # of the run's directory


class BatchScript(Struct, frozen=True):
    """A run as a job. words: the command of the run. options: of sbatch, over those that the run gives itself."""

    name: str
    folder: Path  # the run's directory
    directory: Path  # that the run is started in
    words: Sequence[str]
    save_seconds: int
    nodes: int | None = None  # None: `options` say how many
    gpus_per_node: int = 0
    cores_per_node: int = 0  # 0: as many as the partition gives
    options: Mapping[str, str | int | bool] = {}
    setup: Sequence[str] = ()
    outlives_nodes: bool = False  # the job goes on where a node fails

    @property
    def text(self) -> str:
        """The script. SIGTERM comes `save_seconds` before the time limit, to the run alone."""
        own: dict[str, str | int | bool] = {"job-name": self.name}
        if self.nodes is not None:
            own["nodes"] = self.nodes
        own["ntasks-per-node"] = 1
        if self.gpus_per_node:
            own["gpus-per-node"] = self.gpus_per_node
        if self.cores_per_node:
            own["cpus-per-task"] = self.cores_per_node
        own |= {
            "output": str(self.folder).replace("%", "%%") + f"/{LOG}",
            "open-mode": "append",
            "requeue": True,
            "no-kill": self.outlives_nodes,
            "signal": f"B:TERM@{self.save_seconds}",
            "chdir": str(self.directory),
        }
        lines = [f"#SBATCH --{name}{_value(value)}" for name, value in (own | dict(self.options)).items() if value]
        return "\n".join(["#!/bin/bash", *lines, "set -e", *self.setup, f"exec {shlex.join(self.words)}", ""])


def submit(script: Path) -> str:
    """Hand a script to Slurm; the job's id. Raises ConfigError."""
    where = Where("command line", path="--submit")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        hint = "type it on a host with Slurm's commands; --submit --dry-run shows the script anywhere"
        raise ConfigError([Problem(where, "there is no `sbatch` here", hint, "slurm")]) from None
    except subprocess.TimeoutExpired:
        hint = "see by squeue if the job is in the queue before you try again"
        raise ConfigError([Problem(where, f"sbatch gave no answer in {ASK_SECONDS:.0f} s", hint, "slurm")]) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().removeprefix("sbatch: error: ")
        hint = f"launch.options has what sbatch is to be given; the script is {script}"
        raise ConfigError([Problem(where, f"sbatch refuses the job: {said}", hint, "slurm")])
    return done.stdout.strip().partition(";")[0]


def _value(value: str | int | bool) -> str:
    """As sbatch reads it in a script: it ends at a space, and quotes and backslashes mean what they do in a shell."""
    text = str(value)
    if shlex.quote(text) != text:
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "" if value is True else f"={text}"
