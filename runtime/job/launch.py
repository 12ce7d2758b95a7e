"""The section `launch` of a run file: on which hosts a run's workers are started, and by whom."""

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0)]
ListenAddress = Annotated[str, Meta(pattern=r"^[^:\s]+:[0-9]{1,5}$")]


class LocalLaunch(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="local"):
    """All workers on the host where `realgraph run` is typed."""


class HostsLaunch(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hosts"):
    """On every node of the cluster an agent, started by hand or over ssh, dials in: `realgraph worker --connect`."""

    listen: ListenAddress  # HOST:PORT of the host where `realgraph run` is typed, as the others reach it
    interface: str | None = None  # network interface of every host for samples and weights; default: that to `listen`
    join_seconds: Seconds = 600.0  # for all hosts to join
    trusted_network: bool = False  # allow public addresses: gloo, NCCL and torch's store do not authenticate


LaunchSpec = LocalLaunch | HostsLaunch
