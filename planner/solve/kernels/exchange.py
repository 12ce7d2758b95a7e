"""Compiled: options that may be exchanged for one that is no worse, where all tasks have their meshes.

The tables' own dominance (`dominance.py`) holds for all placements, so it allows for all that a layout might save in
moves of weights and shared copies elsewhere. On given meshes these are known, and far fewer options are nondominated.
"""

from realgraph.planner.solve.kernels.compiled import ZERO, Floats, Ints, compiled
from realgraph.planner.solve.kernels.instance import Instance
from realgraph.planner.solve.kernels.lists import Lists
from realgraph.planner.solve.kernels.memory import MemoryNeeds


@compiled
def drop_dominated(
    instance: Instance, needs: MemoryNeeds, lists: Lists, moves: Floats, move_begin: Ints, move_columns: Ints
) -> None:
    """Drops each option that another, kept one can take the place of in every plan on these meshes.

    That one is no worse in seconds, latency, each kind of bytes and the seconds of each move, whatever the option at
    the other end; its layout is the same where calls on the same mesh may share a copy or are tied. All tasks have a
    mesh, none an option. moves: the matrices of `choose`, of arc a from move_begin[a] on with move_columns[a] columns.
    """
    for i in range(len(instance.role)):
        bound = _bound_by_layout(instance, needs, i)
        kept = ZERO
        for c in range(lists.left[i]):
            b = lists.options[i, c]
            beaten = False
            for place in range(kept):
                a = lists.options[i, place]
                beaten = _no_worse(instance, a, b, bound) and _moved_no_longer(
                    instance, lists, i, a, b, moves, move_begin, move_columns
                )
                if beaten:
                    break
            if not beaten:
                lists.options[i, kept] = b
                kept += 1
        lists.left[i] = kept


@compiled
def _bound_by_layout(instance: Instance, needs: MemoryNeeds, task: int) -> bool:
    """True where the task's layout means something to another one: a copy that both may use, or a tie."""
    for j in range(len(instance.role)):
        shares = instance.role[j] == instance.role[task] and needs.mesh[j] == needs.mesh[task]
        if j != task and (shares or instance.tied[j] == instance.tied[task]):
            return True
    return False


@compiled
def _no_worse(instance: Instance, a: int, b: int, bound: bool) -> bool:
    """True where option a is as good as b but for moves."""
    if (
        instance.seconds[a] > instance.seconds[b]
        or instance.latency[a] > instance.latency[b]
        or instance.resident[a] > instance.resident[b]
        or instance.active[a] > instance.active[b]
        or instance.host[a] > instance.host[b]
    ):
        return False
    if not bound:
        return True
    apart = instance.active[a] - instance.shared[a] <= instance.active[b] - instance.shared[b]
    return bool(apart and instance.layout[a] == instance.layout[b])


@compiled
def _moved_no_longer(
    instance: Instance,
    lists: Lists,
    task: int,
    a: int,
    b: int,
    moves: Floats,
    move_begin: Ints,
    move_columns: Ints,
) -> bool:
    """True where no move from or to the task takes longer under option a than under b."""
    one, two = instance.number[a], instance.number[b]
    for arc in range(len(instance.arc_source)):
        source, target = instance.arc_source[arc], instance.arc_target[arc]
        if instance.arc_move[arc] < 0 or (source != task and target != task):
            continue
        other = target if source == task else source
        own, step = (move_columns[arc], ZERO + 1) if source == task else (ZERO + 1, move_columns[arc])
        for c in range(lists.left[other]):
            at = move_begin[arc] + instance.number[lists.options[other, c]] * step
            if moves[at + one * own] > moves[at + two * own]:
                return False
    return True
