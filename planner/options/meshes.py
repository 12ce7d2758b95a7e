"""The device meshes that a search may choose: blocks of a tree of the cluster, and runs of their neighbours. Pure.

Node counts split by their odd factors, then by four, then by two; the devices of a node by two. A mesh is a block, or
consecutive children of one block of nodes. So every mesh is an aligned power of two inside a node, or whole nodes.
"""

from collections.abc import Iterator

from msgspec import Struct

from realgraph.planner.inputs.cluster import Cluster
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import DeviceBlock

MOST_BLOCK_CHILDREN = 9  # children of one block: an odd factor above it splits the block unevenly instead


class Family(Struct, frozen=True):
    """The tree of a cluster's devices, the meshes in it, and of each mesh the group of nodes that it lies in."""

    tree: DeviceBlock
    meshes: tuple[DeviceMesh, ...]
    groups: tuple[int, ...]


def family(cluster: Cluster, reserved: int = 0, named: tuple[DeviceMesh, ...] = ()) -> Family:
    """The meshes of a cluster whose last `reserved` devices stay free; the smallest first.

    named: sound meshes that the user speaks of; they belong to the family too, and no other place stands for theirs.
    Groups of nodes of different kinds never share a mesh: the slower kind would hold the faster one up in every layer.
    """
    blocks, places = [], []
    for group, nodes in enumerate(cluster.groups):
        first = cluster.first_of(group)
        devices = min(nodes.n_devices, cluster.n_devices - reserved - first)
        if devices > 0:
            top = _group_tree(first, devices, nodes.devices_per_node)
            blocks.append(top)
            places += [(mesh, group) for mesh in _meshes(top, nodes.devices_per_node)]
    tree = blocks[0] if len(blocks) == 1 else _parent(blocks, symmetric=False)
    known = {mesh for mesh, _ in places}
    places += [(mesh, group_of(cluster, mesh.first)) for mesh in dict.fromkeys(named) if mesh not in known]
    places.sort(key=lambda entry: (entry[0].n_devices, entry[0].first))
    return Family(_marked(tree, named), tuple(mesh for mesh, _ in places), tuple(group for _, group in places))


def mesh_fault(mesh: DeviceMesh, cluster: Cluster) -> str:
    """Fault of a mesh that is none of this cluster's, '' where it is one: aligned powers of two in a node, or whole
    nodes."""
    last = mesh.first + mesh.n_devices
    if mesh.first < 0 or mesh.n_devices < 1 or last > cluster.n_devices:
        return f"devices {mesh.first} to {last - 1} are not all of the cluster's, 0 to {cluster.n_devices - 1}"
    group = group_of(cluster, mesh.first)
    if group != group_of(cluster, last - 1):
        return f"devices {mesh.first} to {last - 1} are of different kinds: a mesh lies within one kind"
    per_node, base = cluster.groups[group].devices_per_node, cluster.first_of(group)
    first, end = mesh.first - base, last - base
    if first % per_node == 0 and mesh.n_devices % per_node == 0:
        return ""
    if first // per_node != (end - 1) // per_node:
        return f"devices {mesh.first} to {last - 1} cross a node's border without being whole nodes of {per_node}"
    if mesh.n_devices & (mesh.n_devices - 1):
        return f"{mesh.n_devices} devices are neither a power of two nor whole nodes of {per_node}"
    if (first % per_node) % mesh.n_devices:
        return (
            f"{mesh.n_devices} devices must begin at a multiple of {mesh.n_devices} in their node, not at {mesh.first}"
        )
    return ""


def group_of(cluster: Cluster, device: int) -> int:
    """The group of nodes that a device lies in."""
    first = 0
    for group, nodes in enumerate(cluster.groups):
        first += nodes.n_devices
        if device < first:
            return group
    raise ValueError(f"device {device} is none of the cluster's {cluster.n_devices}")


def radices(nodes: int) -> tuple[int, ...]:
    """Number of children of each level's blocks, from the top, down to single nodes; their product is `nodes`.

    Odd factors first, the largest first, then fours, then a two.
    """
    odd, rest = [], nodes
    while rest % 2 == 0:
        rest //= 2
    evens, factor = nodes // rest, 3
    while rest > 1:
        while rest % factor == 0:
            odd.append(factor)
            rest //= factor
        factor += 2
    powers = evens.bit_length() - 1
    return (*reversed(odd), *[4] * (powers // 2), *[2] * (powers % 2))


# --- trees ------------------------------------------------------------------------------------------------------------


def _group_tree(first: int, devices: int, per_node: int) -> DeviceBlock:
    """Tree of a group's devices: its whole nodes, then what is left of a node of which some devices are reserved."""
    nodes, left = divmod(devices, per_node)
    parts = [_nodes_tree(first, nodes, per_node)] if nodes else []
    if left:
        parts.append(_node_tree(first + nodes * per_node, left))
    return parts[0] if len(parts) == 1 else _parent(parts, symmetric=False)


def _nodes_tree(first: int, nodes: int, per_node: int) -> DeviceBlock:
    if nodes == 1:
        return _node_tree(first, per_node)
    widest = radices(nodes)[0]
    if widest > MOST_BLOCK_CHILDREN:
        power = 1 << (nodes.bit_length() - 1)
        sizes = [power, nodes - power]
    else:
        sizes = [nodes // widest] * widest
    children, at = [], first
    for size in sizes:
        children.append(_nodes_tree(at, size, per_node))
        at += size * per_node
    return _parent(children, symmetric=len(set(sizes)) == 1)


def _node_tree(first: int, devices: int) -> DeviceBlock:
    """Powers of two, the largest first: 6 devices are 4 and 2."""
    if devices == 1:
        return DeviceBlock(first, 1)
    power = 1 << (devices.bit_length() - 1)
    half = power // 2 if power == devices else power
    children = (_node_tree(first, half), _node_tree(first + half, devices - half))
    return DeviceBlock(first, devices, children, symmetric=2 * half == devices)


def _parent(children: list[DeviceBlock], symmetric: bool) -> DeviceBlock:
    return DeviceBlock(children[0].first, sum(child.n_devices for child in children), tuple(children), symmetric)


def _marked(block: DeviceBlock, named: tuple[DeviceMesh, ...]) -> DeviceBlock:
    """The tree without the symmetry of blocks that a named mesh has some devices of, but not all."""
    here = DeviceMesh(block.first, block.n_devices)
    cut = tuple(
        m for m in named if m.overlaps(here) and not (m.first <= here.first and here.devices.stop <= m.devices.stop)
    )
    if not cut:
        return block
    return DeviceBlock(
        block.first, block.n_devices, tuple(_marked(child, cut) for child in block.children), symmetric=False
    )


def _meshes(block: DeviceBlock, per_node: int) -> Iterator[DeviceMesh]:
    """All meshes of a block of one group."""
    whole = block.n_devices % per_node == 0
    if whole or (block.n_devices < per_node and block.n_devices & (block.n_devices - 1) == 0):
        yield DeviceMesh(block.first, block.n_devices)
    children = block.children
    if whole and block.n_devices > per_node:
        for i in range(len(children)):
            for j in range(i + 2, len(children) + 1 - (i == 0)):  # runs of two or more that are not all
                yield DeviceMesh(children[i].first, sum(child.n_devices for child in children[i:j]))
    for child in children:
        yield from _meshes(child, per_node)
