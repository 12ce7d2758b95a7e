"""The section `launch` of a run file: on which hosts a run's workers are started, and by whom."""

from typing import Annotated

from msgspec import Meta, Struct, field

Seconds = Annotated[float, Meta(gt=0)]


class LocalLaunch(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="local"):
    """All workers on the host where `realgraph run` is typed."""


class _OnHosts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    interface: str | None = None  # network interface of every host for samples and weights; default: that to the master
    join_seconds: Seconds = 600.0  # for all hosts to join
    trusted_network: bool = False  # allow public addresses: gloo, NCCL and torch's store do not authenticate


class HostsLaunch(_OnHosts, frozen=True, kw_only=True, tag_field="kind", tag="hosts"):
    """On every node of the cluster an agent, started by hand or over ssh, dials in: `realgraph worker --connect`."""

    listen: str  # HOST:PORT of the host where `realgraph run` is typed, as the others reach it


class SlurmLaunch(_OnHosts, frozen=True, kw_only=True, tag_field="kind", tag="slurm"):
    """Inside an allocation of Slurm (`salloc`, `sbatch`), `srun` starts an agent on each of its nodes.

    `realgraph run FILE --submit` writes the batch script and submits it.
    """

    options: dict[str, str | int | bool] = field(default_factory=dict)  # of sbatch: {partition: gpu, time: "12:00:00"}
    setup: tuple[str, ...] = ()  # lines of the batch script before the run, such as `module load cuda`
    save_seconds: Annotated[int, Meta(ge=10, le=65_535)] = 120  # before the time limit, the run saves and ends
    requeue: bool = True  # a run that the time limit ends goes back into the queue, and then goes on


class RayLaunch(_OnHosts, frozen=True, kw_only=True, tag_field="kind", tag="ray"):
    """On a running Ray cluster that asks for a token, one actor a node starts an agent there."""

    address: str = "auto"  # HOST:PORT of the cluster's head, or the cluster that this host is in


LaunchSpec = LocalLaunch | HostsLaunch | SlurmLaunch | RayLaunch
