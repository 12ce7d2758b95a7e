"""Predicted seconds of what moves between calls: trained weights to other copies, offloaded states, samples.

Weights travel in the precision of the copy that gets them, from whatever devices hold the slices. A device that already
holds what it needs receives nothing; a node needs each byte once through its network cards, all of which take part,
and passes it on over its own links. Layouts cut every tensor evenly over tp x pp ranks (routed experts over
`trained_expert_ranks` or `served_expert_ranks` x pp), and over dp x cp besides under fsdp. Bytes per device, seconds.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from realgraph.planner.costs.lengths import Floats
from realgraph.planner.costs.memory.memory import served_expert_ranks, trained_expert_ranks
from realgraph.planner.costs.overhead import collective_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import TRANSPORTS
from realgraph.planner.plan.problem import Ints

BUCKET_BYTES = 512 << 20  # of the buffers that a move goes through: what a device holds besides both copies
# To pack and unpack a bucket, where that does not hide behind the transfer of the next: it is read and written twice,
# 2.1 GB at an A100's 1.3 to 1.7 TB/s, and its tensors take some hundred launches.
BUCKET_SECONDS = 2e-3
# Of the tensors of a layer: metadata, and views of the receiving engine; about twelve, each some 8 us of Python.
LAYER_SECONDS = 1e-4
HOST_BYTES_PER_S = 3e11  # of a GPU node's memory, that all its devices share: two sockets of eight DDR5 channels each
WIRE_BYTES_PER_S = 2e9  # of one worker's TCP connection to another node: one thread's sockets
FIRST_HOST_CUT = 1 << 62  # cuts from this number on stand for copies that wait in host memory
MESSAGE_SECONDS = 1e-3  # of one gather of samples: headers, and waking up the receiving worker


class Copies(Struct, frozen=True, eq=False):
    """The copies of one role that the options of a call on one mesh stand for, arrays of one length."""

    mesh: DeviceMesh
    kind: str
    nodes: tuple[int, int]  # first and last node of the mesh
    per_node: int  # devices of the mesh on one of them
    device_bytes: Floats  # of the weights on each device
    node_bytes: Floats  # of the distinct slices on one node
    cut: Ints  # equal numbers stand for equal layouts, numbers from FIRST_HOST_CUT on for copies in host memory
    whole: float  # of the model
    link: float  # bytes per second of one device to others of its node
    nic: float  # the same to other nodes
    host: float  # the same to its node's memory
    fixed: float  # seconds of any move
    cpu: bool = False  # devices are processes, whose memory is the node's


def copies_of(setting: Setting, layouts: Sequence[Layout], first_device: int = 0, serves: bool = True) -> Copies:
    """The copies of the setting's role under `layouts`, all on one mesh. first_device: of the cluster, where it is one
    group of a mixed one. serves: in an engine that generates, else one that trains or scores."""
    mesh, cluster, costs = layouts[0].mesh, setting.cluster, setting.costs
    known = {layout: (device_bytes(setting, layout, serves), _cut(layout, serves)) for layout in set(layouts)}
    held = np.array([known[layout][0] for layout in layouts])
    whole = float(setting.element * setting.model.n_params(setting.role.head))
    per_node = min(mesh.n_devices, cluster.devices_per_node)
    first = (mesh.first - first_device) // cluster.devices_per_node
    last = (mesh.first + mesh.n_devices - 1 - first_device) // cluster.devices_per_node
    return Copies(
        mesh=mesh,
        kind=f"{cluster.kind}@{first_device}",
        nodes=(first, last),
        per_node=per_node,
        device_bytes=held,
        node_bytes=np.minimum(whole, held * per_node),
        cut=np.array([known[layout][1] for layout in layouts], dtype=np.int64),
        whole=whole,
        link=cluster.link_bytes_per_s * costs.link,
        nic=cluster.nic_bytes_per_s * costs.nic,
        host=1 / offload_seconds(cluster, 1.0, costs),
        fixed=collective_seconds(costs) + setting.model.layers * LAYER_SECONDS,
        cpu=cluster.is_cpu,
    )


def move_seconds(source: Copies, target: Copies) -> Floats:
    """Seconds to bring the weights of each source copy to each target copy: [options of source, options of target].

    By the fastest transport; 0 where a device would get exactly what it holds.
    """
    return fastest_transports(source, target)[0]


def fastest_transports(source: Copies, target: Copies) -> tuple[Floats, Ints]:
    """The same seconds, and the transports as numbers in `TRANSPORTS`.

    From device to device each one gets what it lacks over its link, and what its node lacks through the node's NICs.
    Through host memory every source device writes an equal share of the model there, and each target device reads what
    it lacks; what the node lacks takes the NICs as well. Copies that wait in host memory are read only. On CPUs there
    is no other transport: shared memory inside a node. All parts go on at once, bucket by bucket.
    """
    lacks, network = _lacking(source, target)
    away = source.cut[:, None] >= FIRST_HOST_CUT
    device = np.where(away, np.inf, np.maximum(network, lacks / target.link))
    written = np.where(away, 0.0, source.whole / source.mesh.n_devices / source.host)
    host = np.maximum(np.maximum(network, lacks / target.host), written)
    if source.cpu and target.cpu:
        device, host = np.full_like(host, np.inf), np.maximum(network, lacks / target.link)
    seconds = np.minimum(device, host) + lacks / BUCKET_BYTES * BUCKET_SECONDS + target.fixed
    chosen = np.where(device <= host, TRANSPORTS.index("device"), TRANSPORTS.index("host"))
    return np.where(lacks > 0, seconds, 0.0), np.where(lacks > 0, chosen, TRANSPORTS.index("in_place"))


def _lacking(source: Copies, target: Copies) -> tuple[Floats, Floats]:
    """[options of source, options of target]: bytes that a target device lacks, and seconds on the NICs.

    Of each node: what it needs, less what its own devices hold of it; no faster than all of the source's NICs send.
    Where two partial cuts differ, the worst device holds nothing that it needs.
    """
    need, have = target.node_bytes[None, :], source.node_bytes[:, None]
    same_group = source.kind == target.kind
    inside = same_group and source.nodes[0] <= target.nodes[0] and target.nodes[1] <= source.nodes[1]
    equal = (source.mesh == target.mesh and same_group) * (source.cut[:, None] == target.cut[None, :])
    here = np.where(need >= target.whole, have, np.where(have >= source.whole, need, 0.0)) * inside
    far = np.where(equal, 0.0, np.maximum(0.0, need - here))
    network = np.maximum(far / target.per_node, far / source.mesh.n_devices) / min(source.nic, target.nic)
    covered = same_group and _covers(source.mesh, target.mesh)
    away = source.cut[:, None] >= FIRST_HOST_CUT
    mine = (source.device_bytes[:, None] >= source.whole) * covered & ~away
    return np.where(equal | mine, 0.0, target.device_bytes[None, :]), network


def reallocation_seconds(setting: Setting, serves: bool = True) -> float:
    """Trained weights to the copy of a setting, from devices elsewhere: other nodes where the cluster has several."""
    cluster, layout = setting.cluster, setting.layout
    held = device_bytes(setting, layout, serves)
    whole = setting.element * setting.model.n_params(setting.role.head)
    per_node = min(layout.mesh.n_devices, cluster.devices_per_node)
    seconds = held / (cluster.link_bytes_per_s * setting.costs.link)
    if cluster.nodes > 1:
        through = min(whole, held * per_node) / per_node
        seconds = max(seconds, through / (cluster.nic_bytes_per_s * setting.costs.nic))
    fixed = collective_seconds(setting.costs) + setting.model.layers * LAYER_SECONDS
    return seconds + held / BUCKET_BYTES * BUCKET_SECONDS + fixed


def device_bytes(setting: Setting, layout: Layout, serves: bool = True) -> float:
    """Bytes of a role's weights on one device: all but routed experts are cut over tp x pp. serves: see `copies_of`."""
    model = setting.model
    routed = model.routed_params()
    rest = model.n_params(setting.role.head) - routed
    ranks = served_expert_ranks(layout) if serves else trained_expert_ranks(layout)
    held = rest / layout.tp + routed / ranks
    shards = layout.pp * (layout.dp * layout.cp if layout.sharding == "fsdp" else 1)
    if layout.sharding == "fsdp" and layout.ep > layout.tp:
        held, shards = model.n_params(setting.role.head) / layout.tp, layout.pp * layout.dp * layout.cp
    return setting.element * held / shards


def offload_seconds(cluster: Cluster, nbytes: float, factors: EfficiencyFactors | None = None) -> float:
    """Between a device and its host's memory, one way, while all devices of the node do the same.

    nbytes: per device. factors: measured ones; None: the kind's. On a CPU both lie in one memory: a copy reads and
    writes it.
    """
    if cluster.is_cpu:
        return 2 * nbytes / cluster.memory_bytes_per_s
    shared = HOST_BYTES_PER_S / cluster.devices_per_node
    reached = (factors or device_kind(cluster.kind).costs).host
    return nbytes / min(cluster.pcie_bytes_per_s * reached, shared)


def transfer_seconds(cluster: Cluster, nbytes: float, far: bool) -> float:
    """To bring `nbytes` of samples to each worker, and on to its device, from the workers that made them.

    Workers of one node share its memory. far: from other nodes, each worker over a connection of its own. What a worker
    has made itself is not left out: samples are dealt by their tokens, so most of them change places.
    """
    seconds = MESSAGE_SECONDS + offload_seconds(cluster, nbytes)
    return seconds + nbytes / min(WIRE_BYTES_PER_S, cluster.nic_bytes_per_s) if far else seconds


def _cut(layout: Layout, serves: bool) -> int:
    """A number that tells layouts on one mesh apart; of ep below tp serving engines know nothing."""
    experts = 1 if serves and layout.ep < layout.tp else layout.ep
    axes = (layout.dp, layout.tp, layout.pp, experts, layout.cp)
    number = int(layout.sharding == "fsdp")
    for axis in axes:
        number = number << 12 | axis & 0xFFF
    return number


def _covers(outer: DeviceMesh, inner: DeviceMesh) -> bool:
    return outer.first <= inner.first and inner.first + inner.n_devices <= outer.first + outer.n_devices
