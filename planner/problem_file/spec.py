"""The planning problem as a JSON file that anyone can write: its structs and its JSON Schema. Checks nothing more.

Documented in docs/planning_problem.md. Seconds; bytes are per device of a mesh.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from realgraph.planner.inputs.cluster import MOST_DEVICES

PROBLEM_FORMAT = 1

Count = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[float, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Distance = Annotated[int, Meta(ge=0, le=2**20)]  # steps
Name = Annotated[str, Meta(min_length=1)]
MeshSpec = Annotated[tuple[Annotated[int, Meta(ge=0)], Count], Meta(description="[first device, number of devices]")]


class OptionSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One way to run a call. Give `mesh`, or `meshes` where it is the same on several meshes of one size.

    dp, tp, pp, ep, cp: ranks of each kind. sharding: any word for what else decides how the weights are cut. Options of
    equal ranks and sharding have equal layouts; one that gives none of dp, tp, pp, sharding is like no other.
    offloaded: the weights wait in the host's memory, so no other call reads this copy. latency: seconds until the
    outputs are ready, where that is later than the end. resident: bytes that stay while other calls run. active:
    further bytes while it runs. shared: the part of `active` that a call needs not bring where its role is trained on
    the same mesh under an equal layout. host: bytes of the node's memory, per device. note: any text; the answer
    repeats it.
    """

    seconds: Seconds
    resident: Bytes
    active: Bytes
    mesh: MeshSpec | None = None
    meshes: tuple[MeshSpec, ...] = ()
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    ep: Count = 1
    cp: Count = 1
    sharding: str = ""
    offloaded: bool = False
    latency: Seconds = 0.0
    shared: Bytes = 0
    host: Bytes = 0
    note: str = ""


class CallSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call that holds a mesh once a step. Calls of one role share its weights; `role` defaults to the name."""

    name: Name
    options: Annotated[tuple[OptionSpec, ...], Meta(min_length=1)]
    role: str = ""
    trains: bool = False


class EdgeSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`target` of step k starts at least `delay` seconds after `source` of step k - `distance` has its outputs."""

    source: str
    target: str
    distance: Distance = 0
    delay: Seconds = 0.0


class ReallocationSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Weights that the train call `source` made in step k - `distance` go to `target` before its step k.

    seconds: a row for each option of the source, in it a number for each option of the target; or one number for each
    option of the target, whatever the source. Both meshes are held that long; at 0 nothing is brought.
    in_place: what takes no time where both lie on one mesh, whatever `seconds` says: options of equal layouts where it
    is true; or for each option of the target the numbers of the source's options, from 0, that it reads in place.
    """

    source: str
    target: str
    seconds: tuple[tuple[Seconds, ...] | Seconds, ...]
    distance: Distance = 1
    in_place: bool | tuple[tuple[Annotated[int, Meta(ge=0)], ...], ...] = False


class TieSpec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Calls that must lie on one mesh; with `layout` under an equal layout too."""

    calls: tuple[str, ...]
    layout: bool = False


class ProblemFile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Calls on devices that repeat for ever; the shortest period is wanted.

    memory: bytes of every device, or a list with one number per device; host_memory the same of nodes, unlimited where
    it is left out. devices_per_node: all devices where it is left out. floor_seconds: no period may be below it.
    """

    devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
    memory: Bytes | tuple[Bytes, ...]
    calls: Annotated[tuple[CallSpec, ...], Meta(min_length=1)]
    edges: tuple[EdgeSpec, ...] = ()
    reallocations: tuple[ReallocationSpec, ...] = ()
    ties: tuple[TieSpec, ...] = ()
    devices_per_node: Count | None = None
    host_memory: Bytes | tuple[Bytes, ...] | None = None
    floor_seconds: Seconds = 0.0
    name: str = ""
    format: int = PROBLEM_FORMAT


def problem_schema() -> dict[str, Any]:
    """JSON Schema of a problem file; `realgraph schema` writes it."""
    schema = msgspec.json.schema(ProblemFile)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A planning problem", **schema}
