"""The report of `realgraph plan`: its timeline, slack, bottleneck, memory and words, over plans made by hand."""

import json
import math
import os
import random
import re
from io import StringIO
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realgraph.plan.command import show
from realgraph.plan.view.gantt import MOST_LANES, Gantt, lane_text
from realgraph.plan.view.table import SHADES, allocation_table, memory, mesh_picture
from realgraph.planner.costs.memory.memory import usable_bytes
from realgraph.planner.costs.spread import SPREADS, half_width
from realgraph.planner.plan.events import period
from realgraph.planner.plan.plan import Hashes, Plan, Turn
from realgraph.planner.report.content import Report, report_of
from realgraph.planner.report.diff import diff
from realgraph.planner.report.format import bytes_text, change_text, count_text, devices_text, gap_text, seconds_text
from realgraph.planner.report.html import page
from realgraph.planner.report.price import price_of
from realgraph.planner.report.schedule import DrawnTask, slacks, timeline
from realgraph.planner.report.svg import ACTIVE, CHARACTER_WIDTH, RESIDENT, fitting, log_ticks, shades, ticks
from realgraph.planner.report.text import bound_text, pipelines_text, table_legend
from realgraph.planner.report.trace import trace_json
from realgraph.planner.request.constraints import Constraints
from realgraph.planner.request.request import PlanRequest
from realgraph.planner.search.period_error import calls_error, period_bar
from realgraph.planner.search.search import events_of
from realgraph.screen.terminal import Terminal
from tests.plan_reports import colocated, everything, finished, overlapping

SEEDS = range(20)


def varied(seed: int) -> tuple[PlanRequest, Plan]:
    """The overlapping plan with other seconds."""
    rng = random.Random(seed)
    asked, plan = overlapping()
    allocations = {
        name: msgspec.structs.replace(allocation, seconds=rng.uniform(0.5, 50))
        for name, allocation in plan.allocations.items()
    }
    return asked, finished(asked, allocations, plan.orders)


def report(asked: PlanRequest, plan: Plan) -> Report:
    return report_of(asked, plan, "test", (("test", "by hand"),))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_device_does_two_things_at_once_and_every_second_is_counted(seed: int) -> None:
    shown = report(*varied(seed))
    assert sum(len(lane.devices) for lane in shown.timeline.lanes) == 64
    for lane in shown.timeline.lanes:
        for before, after in pairwise(lane.bars):
            assert before.end <= after.start + 1e-6, (before, after)
        busy = math.fsum(bar.end - bar.start for bar in lane.bars)
        assert busy == pytest.approx(2 * lane.busy_seconds)
        assert lane.idle == pytest.approx(1 - busy / shown.timeline.window_seconds, abs=1e-9)
    drawn = {bar.task for lane in shown.timeline.lanes for bar in lane.bars}
    assert drawn >= set(shown.plan.allocations)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_is_drawn_where_nothing_else_has_its_devices(seed: int) -> None:
    """The stream takes what the calls leave, wherever they fall in a period, and round its end."""
    rng = random.Random(seed)
    ends = sorted(rng.uniform(0, 10) for _ in range(6))
    spans = [(ends[i] + rng.choice([0, 10]), ends[i + 1] - ends[i]) for i in (0, 2, 4)]
    spans[2] = (spans[2][0], spans[2][1] + rng.choice([0.0, 10 - ends[5] + ends[0] / 2]))
    here = frozenset({0})
    others = [DrawnTask(f"c{i}", "inference", seconds, start, here) for i, (start, seconds) in enumerate(spans)]
    room = 10 - math.fsum(seconds for _, seconds in spans)
    stream = DrawnTask("generate", "generate", room * rng.choice([0.3, 1.0]), rng.uniform(0, 10), here)
    (lane,) = timeline((stream, *others), 10.0, (), 1).lanes
    for before, after in pairwise(lane.bars):
        assert before.end <= after.start + 1e-6, (before, after)
    assert math.fsum(bar.end - bar.start for bar in lane.bars) == pytest.approx(2 * lane.busy_seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_may_take_its_slack_longer_and_no_more(seed: int) -> None:
    asked, plan = varied(seed)
    slack = slacks(events_of(asked, plan), plan.period_seconds)
    for name, allocation in plan.allocations.items():
        for more, grows in ((slack[name] * 0.999, False), (slack[name] * 1.001 + 0.01, True)):
            longer = msgspec.structs.replace(allocation, seconds=allocation.seconds + more)
            changed = msgspec.structs.replace(plan, allocations={**plan.allocations, name: longer})
            assert (period(events_of(asked, changed)).seconds > plan.period_seconds * (1 + 1e-9)) == grows, name
    assert {row.call for row in report(asked, plan).rows if row.critical} <= {
        name for name in slack if slack[name] <= 1e-6 * plan.period_seconds
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_the_critical_circuit_adds_up_to_the_period(seed: int) -> None:
    found = report(*varied(seed)).bottleneck
    total = math.fsum(seconds for _, seconds in found.circuit)
    assert total / found.steps == pytest.approx(varied(seed)[1].period_seconds)
    assert found.call in found.sentence and found.call == max(found.circuit, key=lambda node: node[1])[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_error_of_the_period_is_between_those_of_its_calls(seed: int) -> None:
    rng = random.Random(seed)
    asked, plan = varied(seed)
    assert period_bar(asked, plan) == (0, 0)
    errors = {name: rng.uniform(0.05, 0.3) for name in plan.allocations}
    changed = {name: msgspec.structs.replace(a, error=errors[name]) for name, a in plan.allocations.items()}
    known = msgspec.structs.replace(plan, allocations=changed)
    found = calls_error(asked, known)
    assert 0 < found <= max(SPREADS["reallocate"]["plain"], *(errors[one] for one in plan.bottleneck if one in errors))
    low, high = period_bar(asked, known)
    assert low < plan.period_seconds < high and high / low >= math.exp(2 * half_width(found)) * (1 - 1e-9)


def test_a_colocated_plan_keeps_its_devices_busy() -> None:
    shown = report(*colocated())
    (lane,) = shown.timeline.lanes
    assert [bar.task for bar in lane.bars] == ["rollout", "train", "rollout", "train"]
    assert [bar.step for bar in lane.bars] == [0, 0, 1, 1]
    assert lane.idle == pytest.approx(0, abs=0.01)
    assert "rollout bounds the period: resource load 100 % (devices 0-7)" in shown.bottleneck.sentence


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_the_terminal_shows_every_part_at_every_width(width: int) -> None:
    console = Terminal(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    shown = everything()
    show(shown, console)
    said = " ".join(console.export_text().split())
    parts = ["dp/tp/pp", "symmetric", "128 devices", "what if", "doubt", "critical circuit", "$894"]
    for part in [*parts, *(row.call for row in shown.rows)] if width >= 80 else parts[1:]:
        assert part in said, part
    for lane in shown.timeline.lanes:
        assert len(lane_text(lane, shown.timeline.window_seconds, width).plain) == width
        assert "━" in lane_text(lane, shown.timeline.window_seconds, width).plain


@pytest.mark.parametrize("width", [80, 200])
def test_pipelines_new_weights_and_slow_inputs_are_told(width: int) -> None:
    shown = everything()
    console = Terminal(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    show(shown, console)
    terminal = " ".join(console.export_text().split())
    html = page(shown)
    stages = "actor_train 1F1B, critic_train interleaved x2"
    weights = "generate 0.900 s device to device, values in place"
    inputs = "critic_train 0.500 s"
    for text in (f"pipelines {stages}", f"new weights {weights}", f"inputs of the seconds of calls: {inputs}"):
        assert text in terminal
    for text in (f"Pipelines: {stages}.", f"New weights: {weights}.", f"of their seconds: {inputs}."):
        assert text in html
    assert "selective recompute" in terminal or width == 80


def test_layers_of_stages_are_told() -> None:
    """In a word beside the schedule, and each stage's own in the trace."""
    shown = everything()
    train = shown.plan.allocations["critic_train"]
    stages = (*[(10, 10)] * 2, (11, 10), (10, 9))
    staged = msgspec.structs.replace(train, layout=msgspec.structs.replace(train.layout, stages=stages))
    plan = msgspec.structs.replace(shown.plan, allocations={**shown.plan.allocations, "critic_train": staged})
    rows = [msgspec.structs.replace(row, allocation=plan.allocations[row.call]) for row in shown.rows]
    assert "critic_train interleaved x2 (layers 20+20+21+19)" in pipelines_text(rows)
    events = json.loads(trace_json(msgspec.structs.replace(shown, plan=plan)))["traceEvents"]
    told = [event["args"] for event in events if event["name"] == "critic_train"]
    assert told and all(one["layers"] == ["0-9, 41-50", "10-19, 51-60", "20-30, 61-70", "31-40, 71-79"] for one in told)


def test_meshes_are_drawn_on_the_cluster() -> None:
    shown = everything()
    assert mesh_picture(range(32, 64), shown) == "········████████"
    small = msgspec.structs.replace(shown, n_devices=16, devices_per_node=8)
    assert mesh_picture(range(4), small) == "████···· ········"
    large = msgspec.structs.replace(shown, n_devices=1024)
    assert mesh_picture(range(96), large) == "█▄··············"
    assert len(mesh_picture(range(96), msgspec.structs.replace(shown, n_devices=96))) == 16


def test_the_trace_is_one_json_with_a_slice_per_bar() -> None:
    shown = everything()
    document = json.loads(trace_json(shown))
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == sum(len(lane.bars) for lane in shown.timeline.lanes)
    for event in slices:
        assert event["cat"] != "reallocate" or event["args"]["transport"] == "device"
        assert event["dur"] > 0 and event["ts"] + event["dur"] <= shown.timeline.window_seconds * 1e6 + 1
    starts, ends = (
        {event["id"] for event in document["traceEvents"] if event["ph"] == letter} for letter in ("s", "f")
    )
    assert starts == ends != set()


def test_the_page_is_whole_and_escapes_what_users_name() -> None:
    text = page(everything())
    assert "ppo &lt;70b&gt; &amp; friends" in text and "<b>here</b>" not in text
    assert "$" not in re.sub(r"\$[\d,.]+", "", text), "a placeholder was left"
    for forbidden in ("<script", "http://", "https://", "url(", "@import"):
        assert forbidden not in text
    assert "</html>" in page(report(*colocated()))


def test_the_page_and_the_terminal_explain_the_table_in_the_same_words() -> None:
    whole = everything()
    legend = list(table_legend(whole))
    assert [line.partition(":")[0] for line in legend][-1] == "copy"
    assert allocation_table(whole, 200).caption == "; ".join(legend)
    assert all(line in page(whole) for line in legend)


def test_a_plan_does_not_differ_from_itself_and_every_difference_is_named() -> None:
    _, plan = overlapping()
    assert diff(plan, plan) == ()
    train = plan.allocations["actor_train"]
    layout = msgspec.structs.replace(train.layout, tp=8, pp=4)
    moved = msgspec.structs.replace(
        train, layout=layout, seconds=train.seconds * 2, recompute="none", schedule="interleaved"
    )
    orders = {device: (*turns[:-1], Turn("actor_train", 1)) for device, turns in plan.orders.items()}
    other = msgspec.structs.replace(
        plan, allocations={**plan.allocations, "actor_train": moved}, orders=orders, period_seconds=80.0
    )
    other = msgspec.structs.replace(
        other, reallocation_transport={"generate": "host", "values": "in_place"}, staleness=2
    )
    said = {(change.subject, change.what): change for change in diff(plan, other)}
    assert said["actor_train", "layout"].after == "dp 2, tp 8, pp 4 on devices 0-63"
    assert (said["", "staleness"].before, said["", "staleness"].after) == ("0", "2")
    assert said["actor_train", "seconds"].change == "+100 %"
    assert said["actor_train", "recompute"].after == "none"
    assert said["actor_train", "schedule"].after == "interleaved"
    assert said["generate", "transport"].after == "through host memory"
    assert ("values", "transport") not in said
    uneven = [msgspec.structs.replace(layout, stages=stages) for stages in (((20,),) * 4, ((21,), (20,), (20,), (19,)))]
    before, after = ({**plan.allocations, "actor_train": msgspec.structs.replace(train, layout=one)} for one in uneven)
    (told,) = diff(*(msgspec.structs.replace(plan, allocations=one) for one in (before, after)))
    assert (told.what, told.before, told.after) == ("stages", "20 layers a stage", "layers 21+20+20+19")
    hashed = msgspec.structs.replace(plan, hashes=Hashes("1", "2", "3", "4"))
    words = {"the graph or its models", "the batch or lengths", "the cluster", "the table of measured costs"}
    assert {change.what for change in diff(plan, hashed)} == words
    assert said["", "period"].after == "80.0 s"
    assert {"devices 0-31", "devices 32-63"} <= {subject for subject, _ in said}
    assert ("generate", "layout") not in said


def test_memory_is_shown_against_what_the_user_lets_a_plan_fill() -> None:
    asked, plan = colocated()
    capped = msgspec.structs.replace(asked, constraints=Constraints(memory_gb=60.0))
    assert {bar.usable_bytes for bar in report(capped, plan).memory} == {60_000_000_000}
    assert {bar.usable_bytes for bar in report(asked, plan).memory} == {usable_bytes(asked.cluster)}


def test_numbers_are_written_as_people_read_them() -> None:
    texts = {1204.4: "1,204 s", 67.29: "67.3 s", 0.1044: "0.104 s", 0.0684: "68.4 ms", 0.00002: "20.0 us", 0: "0 s"}
    assert {value: seconds_text(value) for value in texts} == texts
    assert [change_text(value) for value in (1.14, 0.968, 1.0001)] == ["+14 %", "-3.2 %", "equal"]
    assert [gap_text(value) for value in (0.0, 0.0013, 0.034, 0.28)] == ["0 %", "0.13 %", "3.4 %", "28 %"]
    assert devices_text([0, 1, 2, 8, 10, 9]) == "0-2, 8-10" and devices_text([3]) == "3"


@given(st.floats(1e-9, 1e9))
def test_seconds_have_three_digits_and_no_empty_fraction(seconds: float) -> None:
    number, unit = seconds_text(seconds).split()
    value = float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    assert value == pytest.approx(seconds, rel=0.0051)
    assert not number.endswith(".")
    assert seconds >= 100 or sum(letter.isdigit() for letter in number.lstrip("0.")) == 3


@pytest.mark.parametrize(
    ("n_params", "text"), [(8.03e9, "8.03B"), (596e6, "596M"), (999.9e6, "1B"), (18_100, "18.1K"), (593e3, "593K")]
)
def test_sizes_of_models_are_written_as_people_name_them(n_params: float, text: str) -> None:
    assert count_text(n_params) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 MB"),
        (3.2e6, "3.2 MB"),
        (99.96e6, "100 MB"),
        (131e6, "131 MB"),
        (999.9e6, "1.0 GB"),
        (1.4228e12, "1,422.8 GB"),
    ],
)
def test_bytes_are_written_with_three_digits_or_a_tenth(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize("width", range(76, 180, 4))
def test_the_allocation_is_never_cut_off_and_spares_columns_instead(width: int) -> None:
    asked, plan = overlapping()
    shown = report(asked, plan)
    console = Terminal(width=width, file=StringIO(), record=True)
    console.print(allocation_table(shown, width))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for row in shown.rows:
        assert row.call in text
        assert seconds_text(row.allocation.seconds) in text


@pytest.mark.parametrize("width", range(60, 160, 4))
def test_every_line_of_the_memory_fits(width: int) -> None:
    shown = everything()
    for line in memory(shown, width):
        legend = any(shade in line.plain for shade in SHADES) and "GB of" not in line.plain
        assert not legend or len(line.plain.rstrip()) <= width


def test_a_price_counts_every_device_all_the_time() -> None:
    asked, plan = overlapping()
    price = price_of(asked.cluster, plan.period_seconds, 300, 2.0)
    assert price is not None
    assert price.per_step == pytest.approx(64 * plan.period_seconds / 3600 * 2)
    assert price.per_run == pytest.approx(300 * price.per_step)


@pytest.mark.parametrize("seed", SEEDS)
def test_axes_have_a_handful_of_round_numbers_within_them(seed: int) -> None:
    rng = random.Random(seed)
    most = 10 ** rng.uniform(-3, 6)
    shown = ticks(most)
    assert shown[0] == 0 and shown[-1] <= most * 1.001 and 4 <= len(shown) <= 9
    assert all(f"{tick / 10 ** math.floor(math.log10(tick)):.2f}".rstrip("0")[-1] in ".12345678" for tick in shown[1:])
    low = 10 ** rng.uniform(-3, 3)
    high = low * 10 ** rng.uniform(0.2, 5)
    between = log_ticks(low, high)
    assert list(between) == sorted(set(between)) and all(low <= tick <= high for tick in between)
    assert len(between) <= 16


def test_a_part_of_memory_has_one_colour_in_all_bars_and_the_largest_have_their_own() -> None:
    colours = shades(everything().memory)
    for kind, count in (("resident", RESIDENT), ("active", ACTIVE)):
        own = [colour for (of, _), colour in colours.items() if of == kind][:count]
        assert len(set(own)) == len(own) > 0


def test_labels_never_reach_beyond_their_bars() -> None:
    for width in range(0, 300, 7):
        assert len(fitting("reallocate:generate", width)) * CHARACTER_WIDTH <= width


def test_the_page_counts_the_groups_that_it_does_not_draw() -> None:
    shown = everything()
    assert "not drawn" not in page(shown)
    lanes = (shown.timeline.lanes[0],) * 45
    many = msgspec.structs.replace(shown, timeline=msgspec.structs.replace(shown.timeline, lanes=lanes))
    n_devices = 5 * len(shown.timeline.lanes[0].devices)
    assert f"5 more groups with {n_devices:,} devices are not drawn" in page(many)


def test_a_plan_in_many_pieces_is_cut_off_with_a_count() -> None:
    shown = everything()
    lanes = tuple(
        msgspec.structs.replace(shown.timeline.lanes[0], devices=(device,)) for device in range(0, 2 * MOST_LANES, 2)
    )
    many = msgspec.structs.replace(shown.timeline, lanes=(*lanes, *shown.timeline.lanes))
    console = Terminal(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Gantt(many))
    assert "2 more groups with 64 devices" in console.export_text()


def test_a_gap_that_the_search_did_not_prove_is_not_called_proven() -> None:
    _, plan = overlapping()
    assert "until the gap was proven" in bound_text(plan)
    wide = msgspec.structs.replace(plan, lower_bound_seconds=plan.period_seconds / 1.08)
    assert "until the gap was proven" not in bound_text(wide) and "stream" in bound_text(wide)
