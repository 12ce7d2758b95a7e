"""`realgraph run --resume` under another plan: on other devices and layouts a run has the numbers of one device."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from realgraph.commands.run import RunOptions, open_run
from realgraph.graphs.errors import ConfigError
from realgraph.run.ending import records_of
from realgraph.run.resume import ResumeOptions, prepare_resume
from tests.runs import GRPO, finish, home, numbers, records, write_run

__all__ = ["home"]

ALONE = {"devices": 1, "dp": 1, "tp": 1, "pp": 1, "cp": 1, "sharding": "replicated"}
# The layout of each step but the first, which one device makes.
LAYOUTS = [
    {**ALONE, "devices": 2, "tp": 2},
    {**ALONE, "devices": 2, "dp": 2, "sharding": "fsdp"},
    {**ALONE, "devices": 4, "dp": 2, "tp": 2},
    {**ALONE, "devices": 4, "pp": 2, "cp": 2},
    ALONE,
]
STEPS = len(LAYOUTS) + 1
TOLERANCE = 2e-3  # of float32, after steps that amplify rounding
NOT_ALIKE = (
    "running",
    "waiting",
    "free_cache_tokens",
    "logprob_gap",
    "entropy",
)  # by the clock, of rounding alone, of a rank's own share


def overrides(layout: dict[str, Any]) -> list[str]:
    devices = layout["devices"]
    pins = [f"allocation.train.{name}={value}" for name, value in {"first": 0, **layout}.items()]
    return [f"cluster.devices={devices}", f"allocation.rollout.devices={devices}", *pins]


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run of one device that nothing interrupts."""
    one = {"cluster": {"devices": 1}, "steps": STEPS, "checkpoint": {"every": 1, "keep": 9}}
    finish(home, "run", str(write_run(home, "replan_whole", GRPO, one)), name="replan_whole")
    return home / "replan_whole"


def begun(whole: Path, target: Path) -> Path:
    """A copy of the run as it was after its first step."""
    shutil.copytree(whole, target, symlinks=True)
    for path in (target / "checkpoints").glob("step-??????"):
        if path.name != "step-000001":
            shutil.rmtree(path)
    (target / "metrics.jsonl").unlink()
    return target


@pytest.mark.slow
def test_each_step_under_another_plan_has_the_numbers_of_one_run(whole: Path, tmp_path: Path) -> None:
    folder = begun(whole, tmp_path / "moved")
    for step, layout in enumerate(LAYOUTS, start=1):
        changes = [*overrides(layout), f"steps={step + 1}"]
        how = ["--replan"]
        if step % 2 == 0:  # by a plan that was made before
            finish(whole.parent, "plan", str(folder / "config.yaml"), *changes, "--out", str(tmp_path / "plan.json"))
            how = ["--plan", str(tmp_path / "plan.json")]
        finish(whole.parent, "run", "--resume", str(folder), *how, *changes, name=whole.name)
        plan = json.loads((folder / "plan.json").read_text())["allocations"]["train"]["layout"]
        assert {**plan, "devices": layout["devices"]}.items() >= layout.items()
        assert records(folder, "start")[-1]["first_step"] == step
    found, expected = numbers(folder), numbers(whole)
    assert found.keys() == set(range(1, STEPS))
    for step in found:
        assert found[step].keys() == expected[step].keys()
        for name, value in expected[step].items():
            if not name.endswith(NOT_ALIKE):
                assert found[step][name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (step, name)
    states = [json.loads((one / f"checkpoints/step-{STEPS:06d}/state.json").read_text()) for one in (whole, folder)]
    assert states[0] == states[1]  # data, versions and counters


def test_what_another_plan_can_not_change_is_refused(whole: Path, tmp_path: Path) -> None:
    folder, replan = begun(whole, tmp_path / "run"), ResumeOptions(replan=True)
    with pytest.raises(ConfigError, match=r"can't change `params\.lr`"):
        prepare_resume(folder, ["params.lr=1"], replan)
    other = shutil.copytree(whole.parent / "model", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"can't change `models\.actor\.path`"):
        prepare_resume(folder, [f"models.actor.path={other}"], replan)
    with pytest.raises(ConfigError, match=r"can't change `cluster`(.|\n)*--replan, or --plan PLAN"):
        prepare_resume(folder, ["cluster.memory_gb=3"])
    with pytest.raises(ConfigError, match="was made for another cluster"):
        prepare_resume(folder, ["cluster.devices=2"], ResumeOptions(plan_file=folder / "plan.json"))
    with pytest.raises(ConfigError, match=r"--replan is for a resumed run(.|\n)*--resume DIR"):
        open_run(folder / "config.yaml", (), RunOptions(replan=True)).__enter__()


def test_fewer_processes_than_one_are_no_way_out_of_too_little_memory(whole: Path, tmp_path: Path) -> None:
    folder = begun(whole, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"no plan fits(.|\n)*hint: use a machine with more memory; or,.* raise it"):
        prepare_resume(folder, ["cluster.memory_gb=0.001"], ResumeOptions(replan=True))


def test_what_follows_from_the_plan_may_change_with_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room that caches have beside other calls is no choice of the user's."""
    folder = begun(whole, tmp_path / "run")
    monkeypatch.setattr("realgraph.run.running.gives_up_caches", lambda request, plan: True)
    assert prepare_resume(folder, [], ResumeOptions(replan=True)).job.gives_up_caches
    assert not prepare_resume(folder, []).job.gives_up_caches


def test_a_run_without_its_run_file_says_how_to_go_on(whole: Path, tmp_path: Path) -> None:
    folder = begun(whole, tmp_path / "run")
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"the run file of this run is gone(.|\n)*step-\d{6}/ROLE"):
        prepare_resume(folder, [])


def test_a_line_that_is_no_record_does_not_stop_a_run_at_its_end(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(whole, tmp_path / "run")
    shutil.copy(whole / "metrics.jsonl", folder)
    n_steps = len(records_of(prepare_resume(folder, [])))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(bytes(8) + b"\n")
    assert len(records_of(prepare_resume(folder, []))) == n_steps > 0
    assert "no record of a run, left out" in capsys.readouterr().err


def test_a_broken_link_in_a_run_directory_is_named(whole: Path, tmp_path: Path) -> None:
    folder = begun(whole, tmp_path / "run")
    shutil.rmtree(folder / "logs")
    (folder / "logs").symlink_to(tmp_path / "gone")
    finished = finish(whole.parent, "run", "--resume", str(folder), name="whole", code=2)
    assert f"can't be written to at {folder}/logs: File exists" in finished.output()
