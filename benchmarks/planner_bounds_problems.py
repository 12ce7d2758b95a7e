"""Small random planning problems as problem files, by family: the shape of the step x the meshes on offer.

Few enough options that all combinations can be looked at, and every field of the format in use now and then. Numbers
are drawn in one of four styles, since searches go wrong where things are equal: whole seconds, so that ties abound;
any seconds; many seconds of 0; one number for all.
"""

import random
from collections.abc import Sequence

from msgspec import Struct

from realgraph.planner.problem_file.spec import CallSpec, EdgeSpec, OptionSpec, ProblemFile, ReallocationSpec, TieSpec

SHAPES = ("ppo", "grpo", "any")
MESHES = ("halves", "runs", "irregular")
STYLES = ("whole", "any", "zeros", "equal")
COMBINATIONS = 1500  # of all calls' rows, about
Mesh = tuple[int, int]
Edge = tuple[str, str, int]


class Call(Struct, frozen=True):
    """A call without its options."""

    name: str
    role: str
    trains: bool = False


class Step(Struct, frozen=True):
    """The calls of a step. moves: from trained weights to the calls that read them; edges: data."""

    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]
    moves: tuple[Edge, ...]
    staleness: int = 0


class Draw(Struct, frozen=True):
    """A source of random numbers in one of several styles."""

    rng: random.Random
    style: str

    def seconds(self, middling: float) -> float:
        rng = self.rng
        match self.style:
            case "whole":
                return float(max(1, round(middling * rng.uniform(0.5, 1.5))))
            case "zeros":
                return rng.choice([0.0, round(middling * rng.uniform(0.5, 1.5), 1)])
            case "equal":
                return 4.0
        return round(middling * rng.uniform(0.5, 1.5), rng.choice([1, 6]))

    def nbytes(self, most: int) -> float:
        return float(self.rng.choice([0, self.rng.randint(0, most), self.rng.randint(0, most)]))


def family(seed: int) -> tuple[str, str, str]:
    """Shape, meshes and style of a seed's problem."""
    return SHAPES[seed % 3], MESHES[seed // 3 % 3], STYLES[seed // 9 % 4]


def problem_of(seed: int) -> ProblemFile:
    """The problem of a seed; see `family`."""
    shape, kind, style = family(seed)
    rng = random.Random(seed)
    draw = Draw(rng, style)
    step = {"ppo": _ppo, "grpo": _grpo, "any": _any}[shape](rng)
    devices = {"halves": rng.choice([2, 4, 8]), "runs": 4, "irregular": rng.choice([3, 5, 6])}[kind]
    meshes = _meshes(rng, kind, devices)
    calls = _calls(draw, step, meshes)
    per_node = rng.choice([None, None, devices, max(1, devices // 2)])
    nodes = -(-devices // (per_node or devices))
    host = rng.choice([None, None, None, rng.randint(5, 60)])
    return ProblemFile(
        devices=devices,
        memory=_memory(rng, calls, devices),
        calls=calls,
        edges=_edges(draw, step),
        reallocations=_reallocations(draw, step, calls),
        ties=_ties(rng, calls),
        devices_per_node=per_node,
        host_memory=None if host is None else rng.choice([float(host), (float(host),) * nodes]),
        floor_seconds=rng.choice([0.0] * 7 + [rng.uniform(1.0, 30.0)]),
        name=f"{shape}, {kind}, {style}, seed {seed}",
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def _ppo(rng: random.Random) -> Step:
    """Generation, scores of frozen roles, values, two train calls; now and then one frozen role is absent."""
    frozen = rng.choice([("ref", "reward"), ("ref", "reward"), ("ref",), ("reward",)])
    readers = (*frozen, "values")
    calls = (
        Call("generate", "actor"),
        *(Call(name, name) for name in frozen),
        Call("values", "critic"),
        Call("actor_train", "actor", True),
        Call("critic_train", "critic", True),
    )
    trains = ("actor_train", "critic_train")
    edges = [("generate", name, 0) for name in readers]
    edges += [(name, train, 0) for name in readers for train in trains if rng.random() < 0.9]
    if rng.random() < 0.2:
        edges.append(("critic_train", "actor_train", 0))
    staleness = rng.choice([0, 0, 1, 2, 4])
    moves = (("actor_train", "generate", 1 + staleness), ("critic_train", "values", 1))
    return Step(calls, tuple(edges), moves, staleness)


def _grpo(rng: random.Random) -> Step:
    readers = tuple(name for name in ("ref", "reward") if rng.random() < 0.7)
    calls = [Call("generate", "actor"), *(Call(name, name) for name in readers)]
    moves, staleness = [], rng.choice([0, 0, 1, 2, 8])
    if rng.random() < 0.3:
        calls.append(Call("logprobs", "actor"))
        moves.append(("train", "logprobs", 1))
        readers = (*readers, "logprobs")
    calls.append(Call("train", "actor", True))
    edges = [("generate", name, 0) for name in (*readers, "train")] + [(name, "train", 0) for name in readers]
    return Step(tuple(calls), tuple(edges), (("train", "generate", 1 + staleness), *moves), staleness)


def _any(rng: random.Random) -> Step:
    """Two to five calls of up to four roles, each trained by its last call or frozen; any edges."""
    roles = [rng.choice(("a", "b", "c", "d")) for _ in range(rng.randint(2, 5))]
    trained = {role: i for i, role in enumerate(roles) if rng.random() < 0.5}
    trained = {role: max(i for i, other in enumerate(roles) if other == role) for role in trained}
    calls = tuple(Call(f"{role}{i}", role, trained.get(role) == i) for i, role in enumerate(roles))
    names = [call.name for call in calls]
    density = rng.uniform(0.1, 0.9)
    edges = [
        (names[i], names[j], rng.choice([0, 0, 0, 1]))
        for j in range(len(names))
        for i in range(j)
        if rng.random() < density
    ]
    if rng.random() < 0.7:
        edges.append((names[-1], names[0], rng.choice([1, 1, 2, 3])))
    moves = []
    for call in calls:
        if call.role in trained and not call.trains and rng.random() < 0.9:
            moves.append((names[trained[call.role]], call.name, rng.choice([1, 1, 2, 3])))
    return Step(calls, tuple(edges), tuple(moves), 0)


# --- options ----------------------------------------------------------------------------------------------------------


def _meshes(rng: random.Random, kind: str, devices: int) -> list[Mesh]:
    """Aligned powers of two, or all runs of neighbours, or a few of these."""
    if kind == "halves":
        least = rng.choice([max(1, devices // 2), max(1, devices // 4)])
        sizes = [devices >> shift for shift in range(4) if devices >> shift >= least]
        return [(first, size) for size in sizes for first in range(0, devices, size)]
    runs = [(first, size) for size in range(1, devices + 1) for first in range(devices - size + 1)]
    return runs if kind == "runs" else rng.sample(runs, min(len(runs), rng.randint(2, 5)))


def _calls(draw: Draw, step: Step, meshes: Sequence[Mesh]) -> tuple[CallSpec, ...]:
    rng, most = draw.rng, max(1, int(COMBINATIONS ** (1 / len(step.calls))))
    by_size = rng.random() < 0.6  # what has the same numbers on all meshes of a size can be symmetric
    frozen = {call.role for call in step.calls} - {call.role for call in step.calls if call.trains}
    copies = {role: rng.randint(2, 15) for role in sorted(frozen)}
    made = []
    for call in step.calls:
        work = rng.uniform(3.0, 40.0)
        left, options = most, []
        offered = list(meshes) if rng.random() < 0.6 else rng.sample(list(meshes), rng.randint(1, len(meshes)))
        groups = _groups(rng, offered, by_size)
        while groups and left > 0:
            group = groups.pop()[:left] if options else groups.pop()
            for _ in range(rng.randint(1, 3)):
                if options and left < len(group):
                    break
                left -= len(group)
                options.append(_option(draw, call, group, (work, copies.get(call.role))))
        made.append(CallSpec(call.name, tuple(options), call.role, call.trains))
    return tuple(made)


def _groups(rng: random.Random, offered: Sequence[Mesh], by_size: bool) -> list[list[Mesh]]:
    """Meshes that have options together, in any order."""
    if not by_size:
        groups = [[mesh] for mesh in offered]
    else:
        groups = [[mesh for mesh in offered if mesh[1] == size] for size in sorted({size for _, size in offered})]
    rng.shuffle(groups)
    return groups


def _option(draw: Draw, call: Call, group: Sequence[Mesh], about: tuple[float, int | None]) -> OptionSpec:
    rng, (work, copy) = draw.rng, about
    size = group[0][1]
    seconds = draw.seconds(work / size ** rng.choice([0.5, 0.8, 1.0]))
    layout = rng.choice(["", "cut 0", "cut 1", "cut 1"])
    stays = draw.nbytes(20) if copy is None else float(copy if layout != "cut 0" else 0)
    active = draw.nbytes(30)
    return OptionSpec(
        seconds=seconds,
        resident=stays,
        active=active,
        mesh=group[0] if len(group) == 1 else None,
        meshes=tuple(group) if len(group) > 1 else (),
        dp=size if layout and rng.random() < 0.5 else None,
        sharding=layout,
        offloaded=rng.random() < 0.1,
        latency=rng.choice([0.0, 0.0, 0.0, seconds * rng.uniform(1.0, 3.0)]),
        shared=0.0 if call.trains else float(round(active * rng.choice([0.0, 0.5, 1.0]))),
        host=rng.choice([0.0, 0.0, 0.0, float(rng.randint(1, 9))]),
    )


def _memory(rng: random.Random, calls: Sequence[CallSpec], devices: int) -> float | tuple[float, ...]:
    """Plenty, scarce, or too little for many combinations; now and then unlike on each device."""
    least = sum(min(option.resident for option in call.options) for call in calls)
    most = sum(max(option.resident for option in call.options) for call in calls)
    cap = rng.choice([10.0**6, rng.uniform(least, most + 30) + 5, least + rng.randint(5, 40)])
    if rng.random() < 0.85:
        return float(round(cap))
    return tuple(float(max(0, round(cap - rng.randint(0, 15)))) for _ in range(devices))


# --- links ------------------------------------------------------------------------------------------------------------


def _edges(draw: Draw, step: Step) -> tuple[EdgeSpec, ...]:
    rng = draw.rng
    return tuple(
        EdgeSpec(source, target, distance, rng.choice([0.0, 0.0, 0.0, draw.seconds(3.0)]))
        for source, target, distance in step.edges
    )


def _reallocations(draw: Draw, step: Step, calls: Sequence[CallSpec]) -> tuple[ReallocationSpec, ...]:
    """A matrix, or one number for each option of the target; free in place where layouts are equal, or as listed."""
    rng, options = draw.rng, {call.name: len(call.options) for call in calls}
    made = []
    for source, target, distance in step.moves:
        scale = rng.choice([0.0, 1.0, 4.0, 12.0])
        rows, columns = options[source], options[target]

        def row(columns: int = columns, scale: float = scale) -> tuple[float, ...]:
            return tuple(draw.seconds(scale) if scale else 0.0 for _ in range(columns))

        listed = tuple(tuple(i for i in range(rows) if rng.random() < 0.4) for _ in range(columns))
        seconds = row() if rng.random() < 0.3 else tuple(row() for _ in range(rows))
        in_place = rng.choice([False, True, True, listed])
        made.append(ReallocationSpec(source, target, seconds, distance, in_place))
    return tuple(made)


def _ties(rng: random.Random, calls: Sequence[CallSpec]) -> tuple[TieSpec, ...]:
    if len(calls) < 2 or rng.random() < 0.85:
        return ()
    one, two = rng.sample(list(calls), 2)
    return (TieSpec((one.name, two.name), rng.random() < 0.3),)
