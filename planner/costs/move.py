"""Predicted seconds of what moves between calls: trained weights to other copies, offloaded states, samples.

Weights travel in the precision of the copy that gets them, from whatever devices hold the slices. A device that already
holds what it needs receives nothing; a node needs each byte once through its network cards, all of which take part,
and passes it on over its own links. Layouts cut every tensor evenly over tp x pp ranks (routed experts over ep x pp),
and over dp x cp besides under fsdp. Bytes per device, seconds.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from realgraph.planner.cluster import Cluster
from realgraph.planner.costs.lengths import Floats
from realgraph.planner.costs.overhead import collective_seconds
from realgraph.planner.costs.setting import Setting
from realgraph.planner.layout import DeviceMesh, Layout
from realgraph.planner.problem import Ints

BUCKET_BYTES = 512 << 20  # of the buffers that a move goes through: what a device holds besides both copies
BUCKET_SECONDS = 2e-3  # to pack and unpack a bucket, where that does not hide behind the transfer of the next
LAYER_SECONDS = 1e-4  # of the tensors of a layer: metadata, and views of the receiving engine
PCIE_EFFICIENCY = 0.9  # of the rate of pinned copies, which devices.yaml has
HOST_BYTES_PER_S = 3e11  # of a GPU node's memory, that all its devices share: two sockets of eight DDR5 channels each
WIRE_BYTES_PER_S = 2e9  # of one worker's TCP connection to another node: one thread's sockets
IN_HOST = 1 << 62  # cuts from this number on stand for copies that wait in host memory
MESSAGE_SECONDS = 1e-3  # of one gather of samples: headers, and waking up the receiving worker


class Copies(Struct, frozen=True, eq=False):
    """The copies of one role that the options of a call on one mesh stand for, arrays of one length.

    nodes: first and last node of the mesh. per_node: devices of the mesh on one of them. device_bytes: of the weights
    on each device; node_bytes: of the distinct slices on one node; whole: of the model. cut: equal numbers stand for
    equal layouts, numbers from IN_HOST on for copies in host memory. link, nic and host: bytes per second of one
    device, to others of its node, to other nodes, and to its node's memory. fixed: seconds of any move.
    """

    mesh: DeviceMesh
    kind: str
    nodes: tuple[int, int]
    per_node: int
    device_bytes: Floats
    node_bytes: Floats
    cut: Ints
    whole: float
    link: float
    nic: float
    host: float
    fixed: float


def copies_of(setting: Setting, layouts: Sequence[Layout], first_device: int = 0) -> Copies:
    """The copies of the setting's role under `layouts`, all on one mesh. first_device: of the cluster, where it is one
    group of a mixed one."""
    mesh, cluster, costs = layouts[0].mesh, setting.cluster, setting.costs
    held = np.array([device_bytes(setting, layout) for layout in layouts])
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
        cut=np.array([_cut(layout) for layout in layouts], dtype=np.int64),
        whole=whole,
        link=cluster.link_bytes_per_s * costs.link,
        nic=cluster.nic_bytes_per_s * costs.nic,
        host=1 / offload_seconds(cluster, 1.0),
        fixed=collective_seconds(costs) + setting.model.layers * LAYER_SECONDS,
    )


def move_seconds(source: Copies, target: Copies) -> Floats:
    """Seconds to bring the weights of each source copy to each target copy: [options of source, options of target].

    0 where a device would get exactly what it holds. Of each node: what it needs, less what its own devices hold of it,
    through its NICs; and no faster than all of the source's NICs send. Of each device: what it lacks, over its link.
    Both go on at once, bucket by bucket. Where two partial cuts differ, the worst device holds nothing that it needs.
    """
    need, have = target.node_bytes[None, :], source.node_bytes[:, None]
    same_group = source.kind == target.kind
    inside = same_group and source.nodes[0] <= target.nodes[0] and target.nodes[1] <= source.nodes[1]
    equal = (source.mesh == target.mesh and same_group) * (source.cut[:, None] == target.cut[None, :])
    here = np.where(need >= target.whole, have, np.where(have >= source.whole, need, 0.0)) * inside
    far = np.where(equal, 0.0, np.maximum(0.0, need - here))
    nic = min(source.nic, target.nic)
    network = np.maximum(far / target.per_node, far / source.mesh.n_devices) / nic
    covered = same_group and _covers(source.mesh, target.mesh)
    away = source.cut[:, None] >= IN_HOST
    mine = (source.device_bytes[:, None] >= source.whole) * covered & ~away
    lacks = np.where(equal | mine, 0.0, target.device_bytes[None, :])
    near = np.where(away, min(target.link, target.host), target.link)
    seconds = np.maximum(network, lacks / near) + lacks / BUCKET_BYTES * BUCKET_SECONDS
    return np.where(lacks > 0, seconds + target.fixed, 0.0)


def reallocation_seconds(setting: Setting) -> float:
    """Trained weights to the copy of a setting, from devices elsewhere: other nodes where the cluster has several."""
    cluster, layout = setting.cluster, setting.layout
    held = device_bytes(setting, layout)
    whole = setting.element * setting.model.n_params(setting.role.head)
    per_node = min(layout.mesh.n_devices, cluster.devices_per_node)
    seconds = held / (cluster.link_bytes_per_s * setting.costs.link)
    if cluster.nodes > 1:
        through = min(whole, held * per_node) / per_node
        seconds = max(seconds, through / (cluster.nic_bytes_per_s * setting.costs.nic))
    fixed = collective_seconds(setting.costs) + setting.model.layers * LAYER_SECONDS
    return seconds + held / BUCKET_BYTES * BUCKET_SECONDS + fixed


def device_bytes(setting: Setting, layout: Layout) -> float:
    """Bytes of a role's weights on one device: routed experts are cut over max(ep, tp) x pp, the rest over tp x pp."""
    model = setting.model
    routed = model.expert_layers * model.experts * model.expert_params()
    rest = model.n_params(setting.role.head) - routed
    held = rest / layout.tp + routed / max(layout.ep, layout.tp)
    shards = layout.pp * (layout.dp * layout.cp if layout.sharding == "fsdp" else 1)
    if layout.sharding == "fsdp" and layout.ep > layout.tp:
        held, shards = model.n_params(setting.role.head) / layout.tp, layout.pp * layout.dp * layout.cp
    return setting.element * held / shards


def offload_seconds(cluster: Cluster, nbytes: float) -> float:
    """Between a device and its host's memory, one way, while all devices of the node do the same.

    nbytes: per device. On a CPU both lie in one memory: a copy reads and writes it.
    """
    if cluster.is_cpu:
        return 2 * nbytes / cluster.memory_bytes_per_s
    shared = HOST_BYTES_PER_S / cluster.devices_per_node
    return nbytes / min(cluster.pcie_bytes_per_s * PCIE_EFFICIENCY, shared)


def transfer_seconds(cluster: Cluster, source: DeviceMesh, target: DeviceMesh, nbytes: float) -> float:
    """Samples of a batch, `nbytes` in all, from the workers of one mesh to those of another, each sample once.

    Workers of one node share host memory; between nodes each worker has its own connections. What stays on a worker is
    not counted: of two equal meshes nothing moves but what balancing by tokens moves, taken as all.
    """
    workers = min(source.n_devices, target.n_devices)
    per_node = cluster.devices_per_node
    near = source.first // per_node == (target.first + target.n_devices - 1) // per_node
    rate = min(cluster.link_bytes_per_s, HOST_BYTES_PER_S / per_node) if near else WIRE_BYTES_PER_S
    return MESSAGE_SECONDS + nbytes / (workers * rate)


def sample_bytes(prompt_tokens: float, new_tokens: float, token_bytes: int) -> float:
    """Bytes of one sample: its token ids (8), mask (1), and `token_bytes` a token of the other keys a call reads."""
    return (prompt_tokens + new_tokens) * (9 + token_bytes)


def _cut(layout: Layout) -> int:
    """A number that tells layouts on one mesh apart."""
    axes = (layout.dp, layout.tp, layout.pp, layout.ep, layout.cp)
    number = int(layout.sharding == "fsdp")
    for axis in axes:
        number = number << 12 | axis & 0xFFF
    return number


def _covers(outer: DeviceMesh, inner: DeviceMesh) -> bool:
    return outer.first <= inner.first and inner.first + inner.n_devices <= outer.first + outer.n_devices
