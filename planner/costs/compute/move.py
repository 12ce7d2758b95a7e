"""Predicted seconds of what moves between calls: trained weights to other copies, offloaded states, samples.

Weights travel in the precision of the copy that gets them, from whatever devices hold the slices. A device receives
what it does not hold; a node needs each byte once through its network cards, all of which take part, and passes it on
over its own links. Which slices lie where is `slices.py`'s business. Bytes per device, seconds.
"""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from realgraph.planner.costs.compute.slices import Cuts, Runs, Weights, common_bytes, cuts_of, resident_bytes
from realgraph.planner.costs.engine_overheads import EngineOverheads
from realgraph.planner.costs.overhead import collective_seconds, link_share
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.inputs.devices import EfficiencyFactors, device_kind
from realgraph.planner.inputs.model_spec import ModelSpec
from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.planner.plan.plan import TRANSPORTS, Transport
from realgraph.planner.plan.problem import Bools, Floats, Ints

BUCKET_BYTES = 512 << 20  # of the buffers that a move goes through: what a device holds besides both copies
# To pack and unpack a bucket, where that does not hide behind the transfer of the next: it is read and written twice,
# 2.1 GB at an A100's 1.3 to 1.7 TB/s, and its tensors take some hundred launches.
BUCKET_SECONDS = 2e-3
# Of the tensors of a layer: metadata, and views of the receiving engine; about twelve, each some 8 us of Python.
LAYER_SECONDS = 1e-4
HOST_BYTES_PER_S = 3e11  # of a GPU node's memory, that all its devices share: two sockets of eight DDR5 channels each
WIRE_BYTES_PER_S = 2e9  # of one worker's TCP connection to another node: one thread's sockets
LEAST_SHARE = 1e-9  # of a model: what rounding leaves, below any tensor
MESSAGE_SECONDS = 1e-3  # of one gather of samples: headers, and waking up the receiving worker


class Copies(Struct, frozen=True, eq=False):
    """The copies of one role that the options of a call on one mesh stand for."""

    mesh: DeviceMesh
    kind: str
    nodes: tuple[int, int]  # first and last node of the mesh
    per_node: int  # devices of the mesh on one of them
    cuts: Cuts  # the different ones
    device_bytes: Floats  # [cuts]: of the weights on each device
    node_bytes: Floats  # [cuts]: of the distinct slices on the fullest node
    cut: Ints  # [options]: the number of its cut
    away: Bools  # [options]: whether it waits in host memory
    weights: Weights  # of the model
    link: float  # bytes per second of one device to others of its node, in messages
    read: float  # the same where a device reads what lies in another's memory: processes of one host
    nic: float  # the same to other nodes
    host: float  # the same to its node's memory
    fixed: float  # seconds of any move
    cpu: bool = False  # devices are processes, whose memory is the node's
    takes_whole: bool = False  # every device that gets weights gets the whole model's

    @property
    def whole(self) -> float:
        """Bytes of the model."""
        return self.weights.dense + self.weights.routed

    @property
    def taken(self) -> Floats:
        """[cuts]: bytes that a device takes in which has none of its part."""
        return np.full_like(self.device_bytes, self.whole) if self.takes_whole else self.device_bytes

    @property
    def runs(self) -> Runs:
        """The mesh's devices on each of its nodes."""
        return Runs(np.arange(0, self.mesh.n_devices, self.per_node), self.per_node)


def copies_of(
    setting: Setting,
    layouts: Sequence[Layout],
    first_device: int = 0,
    serves: bool = True,
    away: Bools | None = None,
) -> Copies:
    """The copies of the setting's role under `layouts`, all on one mesh. first_device: of the cluster, where it is one
    group of a mixed one. serves: in an engine that generates, else one that trains or scores. away: which of them wait
    in host memory, None: none."""
    mesh, cluster, costs = layouts[0].mesh, setting.cluster, setting.costs
    cuts, number = cuts_of(layouts, serves)
    weights = _weights(setting)
    per_node = min(mesh.n_devices, cluster.devices_per_node)
    first = (mesh.first - first_device) // cluster.devices_per_node
    last = (mesh.first + mesh.n_devices - 1 - first_device) // cluster.devices_per_node
    return Copies(
        mesh=mesh,
        kind=f"{cluster.kind}@{first_device}",
        nodes=(first, last),
        per_node=per_node,
        cuts=cuts,
        device_bytes=resident_bytes(cuts, Runs(np.zeros(1, dtype=np.int64), 1), weights),
        node_bytes=resident_bytes(cuts, Runs(np.arange(0, mesh.n_devices, per_node), per_node), weights),
        cut=number,
        away=np.zeros(len(layouts), dtype=np.bool_) if away is None else away,
        weights=weights,
        link=cluster.link_bytes_per_s * link_share(costs, "p2p" if cluster.is_cpu else "allreduce"),
        read=cluster.memory_bytes_per_s * costs.memory / 2,  # each byte is read and written
        nic=cluster.nic_bytes_per_s * costs.nic,
        host=1 / offload_seconds(cluster, 1.0, costs),
        fixed=_agreed_seconds(setting) + setting.model.layers * LAYER_SECONDS,
        cpu=cluster.is_cpu,
    )


def received(copies: Copies, model: ModelSpec, overheads: EngineOverheads) -> Copies:
    """The copies as an engine with such overheads takes them in."""
    most = overheads.sync_bytes_per_s or math.inf
    return replace(
        copies,
        link=min(copies.link, most),
        read=min(copies.read, most),
        host=min(copies.host, most),
        fixed=copies.fixed + overheads.sync_seconds + weight_tensors(model) * overheads.sync_tensor_seconds,
        takes_whole=overheads.sync_whole,
    )


def weight_tensors(model: ModelSpec) -> int:
    """Number of weight tensors as checkpoints name them: about nine a layer, and three an expert."""
    return 9 * model.layers + 3 * model.expert_layers * model.experts + 3


def _agreed_seconds(setting: Setting) -> float:
    """Words of senders and receivers round a move; on a CPU host that weights are final, who reads them, and that they
    were read."""
    cluster, costs = setting.cluster, setting.costs
    return 3 * collective_seconds(cluster, costs, "p2p") if cluster.is_cpu else collective_seconds(cluster, costs)


def _weights(setting: Setting) -> Weights:
    routed = setting.model.routed_params()
    whole = setting.model.n_params(setting.role.head)
    return Weights(float(setting.element * (whole - routed)), float(setting.element * routed))


def move_seconds(source: Copies, target: Copies, transports: Sequence[Transport] = TRANSPORTS) -> Floats:
    """Seconds to bring the weights of each source copy to each target copy: [options of source, options of target].

    By the fastest of the `transports` that there are; 0 where every device holds what it would get.
    """
    return fastest_transports(source, target, transports)[0]


def fastest_transports(
    source: Copies, target: Copies, transports: Sequence[Transport] = TRANSPORTS
) -> tuple[Floats, Ints]:
    """The same seconds, and the transports as numbers in `TRANSPORTS`.

    From device to device each one gets what it lacks over its link, and what its node lacks through the node's
    NICs. Through host memory every source device writes an equal share of the model there, and each target device
    reads what it lacks; what the node lacks takes the NICs as well. Copies that wait in host memory are read there,
    whatever other transports there are. All parts go on at once, bucket by bucket. On CPUs both take as long, as a
    device's memory is the host's: processes of one host copy what they lack out of the trained weights
    (`runtime/parallel/mapped.py`), and are sent messages where these are offloaded, or come from other hosts.
    """
    lacks, network = _lacking(source, target)
    away = source.away[:, None]
    device = np.where(away, np.inf, np.maximum(network, lacks / target.link))
    written = np.where(away, 0.0, source.whole / source.mesh.n_devices / source.host)
    host = np.maximum(np.maximum(network, lacks / target.host), written)
    buckets = lacks / BUCKET_BYTES * BUCKET_SECONDS
    if source.cpu and target.cpu:
        near = ~away & (network == 0)
        device = host = np.where(near, lacks / target.read, np.maximum(network, lacks / target.link))
        buckets = np.where(near, 0.0, buckets)
    if "device" not in transports:
        device = np.full_like(device, np.inf)
    if "host" not in transports:
        host = np.where(away, host, np.inf)
    seconds = np.minimum(device, host) + buckets + target.fixed
    chosen = np.where(device <= host, TRANSPORTS.index("device"), TRANSPORTS.index("host"))
    return np.where(lacks > 0, seconds, 0.0), np.where(lacks > 0, chosen, TRANSPORTS.index("in_place"))


def _lacking(source: Copies, target: Copies) -> tuple[Floats, Floats]:
    """[options of source, options of target]: bytes that the target device with the least of them lacks, and seconds on
    the NICs.

    Of the worst node: what it needs, less what its own devices hold of it; no faster than all of the source's NICs
    send. What waits in host memory is near its node and on no device.
    """
    near = far = np.zeros((len(source.node_bytes), len(target.node_bytes)))
    same_group = source.kind == target.kind
    if same_group and source.nodes[0] <= target.nodes[0] and target.nodes[1] <= source.nodes[1]:
        first = target.nodes[0] - source.nodes[0]
        runs = source.runs
        here = Runs(runs.starts[first : first + len(target.runs.starts)], runs.length)
        near = common_bytes(source.cuts, target.cuts, (here, target.runs), target.weights)
    if same_group and _covers(source.mesh, target.mesh):
        devices = np.arange(target.mesh.n_devices)
        offset = target.mesh.first - source.mesh.first
        far = common_bytes(source.cuts, target.cuts, (Runs(devices + offset, 1), Runs(devices, 1)), target.weights)
    equal = same_group and source.mesh == target.mesh and _equal(source.cuts, target.cuts)
    options = np.ix_(source.cut, target.cut)
    least = LEAST_SHARE * target.whole
    missing = _without(np.where(equal, 0.0, target.node_bytes - near), least)[options]
    network = np.maximum(missing / target.per_node, missing / source.mesh.n_devices) / min(source.nic, target.nic)
    lacks = _without(np.where(equal, 0.0, target.device_bytes - far), least)[options]
    if target.takes_whole:
        lacks = np.where(lacks > 0, target.whole, 0.0)
    return np.where(source.away[:, None], target.taken[target.cut], lacks), network


def _without(nbytes: Floats, least: float) -> Floats:
    return np.where(nbytes < least, 0.0, nbytes)


def _equal(source: Cuts, target: Cuts) -> Bools:
    """[cuts of source, cuts of target]: whether devices of one mesh hold the same slices."""
    equal: Bools = np.all(source.table[:, None] == target.table[None], axis=-1)
    return equal


def reallocation_seconds(there: Copies, far: bool) -> Floats:
    """[options]: trained weights to each copy from devices elsewhere. far: from other nodes."""
    arriving = there.taken
    seconds = arriving / (min(there.link, there.read) if there.cpu else there.link)
    if far:
        seconds = np.maximum(seconds, there.node_bytes / there.per_node / there.nic)
    return np.asarray(seconds + arriving / BUCKET_BYTES * BUCKET_SECONDS + there.fixed)[there.cut]


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


def _covers(outer: DeviceMesh, inner: DeviceMesh) -> bool:
    return outer.first <= inner.first and inner.first + inner.n_devices <= outer.first + outer.n_devices
