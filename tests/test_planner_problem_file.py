"""Problem files: what is written is read back as the same problem; mistakes are named by their place; the answer."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.problem_export import problem_spec, problem_text
from realgraph.graphs.errors import ConfigError
from realgraph.planner.plan.layout import DeviceMesh
from realgraph.planner.plan.problem import DeviceBlock, Limits, SearchProblem, Solution, Unsolved
from realgraph.planner.problem_file.codec import ProblemAnswer, answer_of, build_problem, read_problem, solution_json
from realgraph.planner.problem_file.spec import problem_schema
from realgraph.planner.solve.evaluate import orders
from realgraph.planner.solve.solver import solve
from tests.planner_oracles import brute_force
from tests.planner_problems import Size, problem_of_seed

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLE = DOCS / "planning_problem.json"
SMALL = Size(tasks=(2, 5), choices=400)


def same_numbers(left: SearchProblem, right: SearchProblem) -> None:
    """The same meshes, options and moves, whatever their numbers."""
    place = {mesh: i for i, mesh in enumerate(right.meshes)}
    assert (left.devices, left.devices_per_node, left.floor_seconds) == (
        right.devices,
        right.devices_per_node,
        right.floor_seconds,
    )
    assert (left.memory == right.memory).all() and (left.host_memory == right.host_memory).all()
    assert left.precedences == right.precedences and left.moves == right.moves and left.ties == right.ties
    other = {task.name: task for task in right.tasks}
    for task in left.tasks:
        twin = other[task.name]
        assert (task.role, task.trains) == (twin.role, twin.trains)
        assert {left.meshes[m] for m in task.tables} == {right.meshes[m] for m in twin.tables}
        for mesh, number in task.tables.items():
            one, two = left.tables[number], right.tables[twin.tables[place[left.meshes[mesh]]]]
            for column in ("seconds", "latency", "resident", "active", "shared", "host"):
                assert (getattr(one, column) == getattr(two, column)).all()
    for move in left.moves:
        tasks = {task.name: task for task in left.tasks}
        for source in tasks[move.source].tables:
            for target in tasks[move.target].tables:
                expected = left.move_seconds(move, source, target)
                found = right.move_seconds(move, place[left.meshes[source]], place[left.meshes[target]])
                assert (expected == found).all()


@pytest.mark.parametrize("seed", range(120))
def test_what_is_written_is_read_back(seed: int) -> None:
    problem = problem_of_seed(seed, SMALL)
    spec = problem_spec(problem, name=f"seed {seed}")
    read = read_problem(problem_text(spec))
    assert read.spec == spec
    same_numbers(problem, read.problem)
    one, two = brute_force(problem), brute_force(read.problem)
    assert (one and one.period) == pytest.approx(two and two.period)


def images(mesh: DeviceMesh, at: int, width: int) -> DeviceMesh | None:
    """The image of a mesh when the block [at, at + width) and the next are exchanged; None where that is no mesh."""
    devices = sorted(
        device + width
        if at <= device < at + width
        else device - width
        if at + width <= device < at + 2 * width
        else device
        for device in mesh.devices
    )
    return DeviceMesh(devices[0], len(devices)) if devices[-1] - devices[0] == len(devices) - 1 else None


def check_symmetry(problem: SearchProblem, block: DeviceBlock) -> int:
    """Every exchange that the tree allows leaves the problem as it is. How many there are."""
    found = 0
    numbers = {mesh: i for i, mesh in enumerate(problem.meshes)}
    for left, right in zip(block.children, block.children[1:], strict=False) if block.symmetric else ():
        assert left.n_devices == right.n_devices and left.first + left.n_devices == right.first
        found += 1
        after = {i: numbers[images(m, left.first, left.n_devices)] for m, i in numbers.items()}  # type: ignore[index]
        for task in problem.tasks:
            assert {after[mesh]: table for mesh, table in task.tables.items()} == task.tables
        tasks = {task.name: task for task in problem.tasks}
        for move in problem.moves:
            for source in tasks[move.source].tables:
                for target in tasks[move.target].tables:
                    one = problem.move_seconds(move, source, target)
                    assert (one == problem.move_seconds(move, after[source], after[target])).all()
    return found + sum(check_symmetry(problem, child) for child in block.children)


def test_symmetry_is_found_and_true() -> None:
    found = missed = 0
    for seed in range(150):
        problem = problem_of_seed(seed, SMALL)
        tree = build_problem(problem_spec(problem)).problem.tree
        if tree is not None:
            found += check_symmetry(build_problem(problem_spec(problem)).problem, tree)
        in_runs = len({mesh.n_devices for mesh in problem.meshes}) == 4  # runs of neighbours are no symmetry
        missed += problem.tree is not None and tree is None and not in_runs
    assert found > 100 and missed == 0


# --- mistakes ---------------------------------------------------------------------------------------------------------


def option(**changes: Any) -> dict[str, Any]:
    return {"mesh": [0, 4], "dp": 1, "tp": 4, "pp": 1, "seconds": 2.0, "resident": 1, "active": 2} | changes


def small(**changes: Any) -> dict[str, Any]:
    calls = [
        {"name": "generate", "role": "actor", "options": [option(), option(mesh=[0, 2], tp=2)]},
        {"name": "train", "role": "actor", "trains": True, "options": [option(resident=3)]},
    ]
    whole: dict[str, Any] = {
        "devices": 4,
        "memory": 10,
        "calls": calls,
        "edges": [{"source": "generate", "target": "train"}],
        "reallocations": [{"source": "train", "target": "generate", "seconds": [[0.0, 0.5]]}],
    }
    return whole | changes


def with_option(**changes: Any) -> dict[str, Any]:
    whole = small()
    whole["calls"][0]["options"][1] |= changes
    return whole


def moved(**changes: Any) -> dict[str, Any]:
    return small(reallocations=[small()["reallocations"][0] | changes])


MISTAKES = [
    ("[]", "$", "expected `object`, got `array`"),
    ("{", "$", "this is no JSON"),
    (b"\xff\xfe", "$", "this is no JSON"),
    ('{"devices": "many", "mem', "$", "this is no JSON"),
    (b'{"devices": "many", "name": "\xff"}', "$", "this is no JSON"),
    ("[" * 100_000, "$", "this is no JSON"),
    (small(devices=0), "$.devices", "expected `int` >= 1"),
    (small(device=4), "$", "unknown field `device`"),
    (small(format=7), "$.format", "this version reads format 1"),
    (small(memory=[1, 2]), "$.memory", "2 numbers for 4 devices"),
    (small(devices_per_node=2, host_memory=[1]), "$.host_memory", "1 numbers for 2 nodes"),
    (small(calls=[]), "$.calls", "length >= 1"),
    (with_option(secnds=1), "$.calls[0].options[1]", "unknown field `secnds`"),
    (with_option(seconds=-1), "$.calls[0].options[1].seconds", ">= 0"),
    (with_option(seconds="1"), "$.calls[0].options[1].seconds", "expected `float`, got `str`"),
    (with_option(mesh=None), "$.calls[0].options[1]", "either `mesh` or `meshes`"),
    (with_option(meshes=[[0, 2]]), "$.calls[0].options[1]", "either `mesh` or `meshes`"),
    (with_option(mesh=[3, 2]), "$.calls[0].options[1].mesh", "devices 3 to 4 are not all of the 4, 0 to 3"),
    (with_option(tp=3), "$.calls[0].options[1]", "dp x tp x pp x cp is 3, the mesh has 2 devices"),
    (with_option(mesh=None, meshes=[[0, 2], [0, 4]]), "$.calls[0].options[1].meshes", "have 2 and 4 devices"),
    (with_option(mesh=None, meshes=[[0, 2], [0, 2]]), "$.calls[0].options[1].meshes", "stands twice"),
    (with_option(latency=1.0), "$.calls[0].options[1].latency", "below the option's 2.0 seconds"),
    (with_option(shared=3), "$.calls[0].options[1].shared", "3 is more than `active`, 2"),
    (small(calls=[*small()["calls"], small()["calls"][0]]), "$.calls[2].name", "two calls are named 'generate'"),
    (small(edges=[{"source": "generat", "target": "train"}]), "$.edges[0].source", "no call is named 'generat'"),
    (small(edges=[{"source": "generate", "target": "train", "distance": -1}]), "$.edges[0].distance", ">= 0"),
    (moved(target="x"), "$.reallocations[0].target", "no call is named 'x'"),
    (moved(source="generate", target="train"), "$.reallocations[0].source", "'generate' does not train"),
    (moved(seconds=[[1.0]]), "$.reallocations[0].seconds[0]", "1 numbers for the 2 options of 'generate'"),
    (moved(seconds=[[1.0, 1.0]] * 2), "$.reallocations[0].seconds", "2 rows for the 1 options of 'train'"),
    (moved(seconds=[1.0]), "$.reallocations[0].seconds", "1 numbers for the 2 options of 'generate'"),
    (moved(seconds=[1.0, [1.0, 1.0]]), "$.reallocations[0].seconds", "numbers stand beside rows"),
    (moved(in_place=[[0]]), "$.reallocations[0].in_place", "1 lists for the 2 options of 'generate'"),
    (moved(in_place=[[0], [1]]), "$.reallocations[0].in_place[1]", "1 is none of the 1 options of 'train'"),
    (moved(distance=0), "$.edges", "generate -> train -> generate waits for itself"),
    (small(reallocations=small()["reallocations"] * 2), "$.reallocations[1].target", "gets weights twice"),
    (small(ties=[{"calls": ["generate", "trai"]}]), "$.ties[0].calls[1]", "no call is named 'trai'"),
    (small(ties=[{"calls": ["train"]}]), "$.ties[0].calls", "two or more"),
]


@pytest.mark.parametrize(("raw", "path", "text"), MISTAKES, ids=[path + text[:20] for _, path, text in MISTAKES])
def test_mistakes_are_named_by_their_place(raw: object, path: str, text: str) -> None:
    data = raw if isinstance(raw, bytes) else raw.encode() if isinstance(raw, str) else json.dumps(raw).encode()
    with pytest.raises(ConfigError) as caught:
        read_problem(data, "problem.json")
    found = [problem for problem in caught.value.problems if problem.where.path == path]
    assert any(text in problem.text for problem in found), caught.value
    assert all(problem.where.file == "problem.json" and problem.hint and problem.rule for problem in found)


def test_all_mistakes_come_at_once() -> None:
    whole = with_option(seconds="x")
    whole["calls"][1]["options"][0]["mesh"] = "all"
    whole["edges"] = [{"source": 1, "target": "train"}]
    with pytest.raises(ConfigError) as caught:
        read_problem(json.dumps(whole))
    paths = {problem.where.path for problem in caught.value.problems}
    assert paths == {"$.calls[0].options[1].seconds", "$.calls[1].options[0].mesh", "$.edges[0].source"}


def test_a_mistyped_field_is_answered_with_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'seconds'"):
        read_problem(json.dumps(with_option(secnds=1)))


# --- rules of the file ------------------------------------------------------------------------------------------------


def test_layouts_are_equal_where_ranks_and_sharding_are() -> None:
    whole = small()
    whole["calls"][0]["options"] = [
        option(),
        option(note="the same"),
        option(sharding="fsdp"),
        option(offloaded=True),
        {"mesh": [0, 4], "seconds": 1, "resident": 0, "active": 0},
        {"mesh": [0, 4], "seconds": 1, "resident": 0, "active": 0},
    ]
    whole["reallocations"][0] |= {"seconds": [1.0] * 6, "in_place": True}
    read = read_problem(json.dumps(whole))
    generate, train = read.problem.tasks
    layout = read.problem.tables[generate.tables[0]].layout
    assert layout[0] == layout[1] == read.problem.tables[train.tables[0]].layout[0]
    assert len(set(layout.tolist())) == 5
    (move,) = read.problem.moves
    assert read.problem.move_seconds(move, 0, 0).tolist() == [[0, 0, 1, 1, 1, 1]]


def test_what_is_read_in_place_may_be_listed() -> None:
    whole = moved(seconds=[[2.0, 3.0]], in_place=[[], [0]])
    whole["calls"][0]["options"][1] = option()
    read = read_problem(json.dumps(whole))
    (move,) = read.problem.moves
    assert read.problem.move_seconds(move, 0, 0).tolist() == [[2.0, 0.0]]


def test_equal_options_share_a_table() -> None:
    whole = small()
    whole["calls"][0]["options"] = [option(mesh=[i, 2], tp=2) for i in (0, 2)]
    generate = read_problem(json.dumps(whole)).problem.tasks[0]
    assert len(set(generate.tables.values())) == 1


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 0.05])
@pytest.mark.parametrize("layouts", ["xyz", "xxx", "xyx"])
def test_a_slower_option_whose_weights_come_sooner_is_found(late: float, layouts: str) -> None:
    """Options of 1.0, 1.1 and 1.2 seconds, to which weights take 10, 10 and 1: the last is best by far."""
    taking = enumerate(zip((1.0, 1.1, 1.2), layouts, strict=True))
    ways = [option(sharding=word, seconds=s, latency=s + i * late) for i, (s, word) in taking]
    calls = [
        {"name": "generate", "role": "actor", "options": ways},
        {"name": "train", "role": "actor", "trains": True, "options": [option(seconds=1.0)]},
    ]
    moves = [{"source": "train", "target": "generate", "seconds": [10.0, 10.0, 1.0]}]
    found = solve(read_problem(json.dumps(small(calls=calls, reallocations=moves))).problem)
    assert isinstance(found, Solution)
    assert found.choices["generate"].option == 2
    assert found.bound <= found.period == pytest.approx(1.2 + 2 * late + 1.0 + 1.0)


def test_calls_that_take_no_time_have_a_plan() -> None:
    whole = small(reallocations=[])
    for call in whole["calls"]:
        for each in call["options"]:
            each["seconds"] = 0.0
    read = read_problem(json.dumps(whole))
    found = solve(read.problem)
    assert isinstance(found, Solution)
    assert (found.period, found.gap, found.stopped) == (0.0, 0.0, "proven")
    answer = json.loads(solution_json(read, found, orders(read.problem, found)))
    assert answer["gap"] == 0.0
    assert set(answer["starts"].values()) == {0.0}


@pytest.mark.parametrize("seconds", [0.0, 1.0, 5e3, 5e7])
def test_a_move_that_takes_far_longer_than_all_calls_is_planned(seconds: float) -> None:
    """Both meshes are held while weights move: generate, train and move follow each other."""
    read = read_problem(
        json.dumps(small(reallocations=[{"source": "train", "target": "generate", "seconds": [seconds] * 2}]))
    )
    found = solve(read.problem)
    assert isinstance(found, Solution)
    assert found.bound <= found.period == pytest.approx(2.0 + 2.0 + seconds)


@pytest.mark.parametrize("seed", range(40))
def test_the_answer_is_json_that_says_it_all(seed: int) -> None:
    read = build_problem(problem_spec(problem_of_seed(seed, SMALL), name="random"))
    found = solve(read.problem, Limits(gap=1e-6))
    turns = orders(read.problem, found) if isinstance(found, Solution) else {}
    answer = json.loads(solution_json(read, found, turns))
    assert answer["name"] == "random" and answer["scope"] and answer["format"] == 1
    assert answer["feasible"] is isinstance(found, Solution)
    if isinstance(found, Unsolved):
        assert answer["proven"] is found.proven and answer["reason"]
        return
    assert answer["period"] == found.period and answer["bound"] == found.bound
    assert answer["gap"] == pytest.approx(found.gap)
    covered = [
        device for order in answer["orders"] for first, n in order["devices"] for device in range(first, first + n)
    ]
    assert sorted(covered) == list(range(read.problem.devices))
    for order in answer["orders"]:
        assert {turn["call"] for turn in order["turns"]} <= answer["starts"].keys()
    for call in read.spec.calls:
        chosen = answer["choices"][call.name]
        row = call.options[chosen["option"]]
        assert row.seconds == chosen["seconds"]
        assert tuple(chosen["mesh"]) in (row.meshes or (row.mesh,))
    for name, seconds in answer["reallocation_seconds"].items():
        assert seconds > 0 and f"reallocate:{name}" in answer["starts"]


def test_the_example_of_the_documentation_is_solved() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(problem_schema()).validate(json.loads(text))
    read = read_problem(text, EXAMPLE.name)
    found = solve(read.problem, Limits(gap=1e-6))
    assert isinstance(found, Solution) and found.stopped == "proven"
    best = brute_force(read.problem)
    assert best is not None and found.period == pytest.approx(best.period)
    answer = answer_of(read, found, orders(read.problem, found))
    assert isinstance(answer, ProblemAnswer)
    assert f"{answer.period:.1f} s" in (DOCS / "planning_problem.md").read_text(encoding="utf-8")


def test_the_schema_takes_what_the_reader_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(problem_schema())
    validator.check_schema(validator.schema)
    for seed in range(20):
        validator.validate(json.loads(problem_text(problem_spec(problem_of_seed(seed)))))
    assert not validator.is_valid(with_option(secnds=1))


def test_a_file_of_five_megabytes_is_read_within_a_second() -> None:
    rng = random.Random(0)
    options = [
        option(mesh=[first, 8], tp=8, seconds=rng.random(), resident=rng.randrange(10**10), active=i)
        for first in range(0, 256, 8)
        for i in range(12)
    ]
    n = len(options)
    seconds = [[rng.random() for _ in range(n)] for _ in range(n)]
    calls: list[dict[str, object]] = [{"name": f"call{i}", "options": options} for i in range(4)]
    calls += [
        {"name": name, "role": "actor", "trains": name == "train", "options": options} for name in ("generate", "train")
    ]
    reallocations = [{"source": "train", "target": "generate", "seconds": seconds}]
    whole = {"devices": 256, "memory": 1e11, "calls": calls, "reallocations": reallocations}
    text = json.dumps(whole)
    while len(text) < 5_000_000:
        text = json.dumps(whole | {"name": " " * (5_000_000 - len(text))})
    began = time.process_time()
    read = read_problem(text)
    assert time.process_time() - began < 1.0
    assert len(read.problem.tables) == 32  # equal for all six calls
