"""`realgraph run --resume`: a run goes on exactly as if it had never stopped, and as no other run."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from realgraph.commands.eval import for_evaluation, model_folder
from realgraph.commands.run import RunOptions, open_run
from realgraph.graphs.errors import ConfigError
from realgraph.planner.inputs.detect import Probe
from realgraph.run import resume
from realgraph.run.costs_record import CostsFile, Planned
from realgraph.run.resume import CHANGEABLE, ResumeOptions, prepare_resume, resumed
from realgraph.run.running import PreparedRun, claim, prepare
from realgraph.runtime.data.data import DataSet, tokenizer_source
from realgraph.runtime.data.tokenize import load_tokenizer
from realgraph.runtime.job.manifest import MANIFEST
from realgraph.runtime.job.run_folder import RunFolder, exclusive
from realgraph.runtime.master.observer import Observers, RunStarted
from realgraph.runtime.master.records import MetricsFile, TraceFile, TranscriptsFile
from tests.mutations import mutate
from tests.runs import BASE, copy_home, finish, home, numbers, records, write_run

__all__ = ["home"]

PPO: dict[str, Any] = {
    "graph": "ppo",
    "params": {"actor_lr": 3.0e-3, "critic_lr": 3.0e-3, "minibatches": 2, "group_size": 2},
    "calls": {
        "reward": {"fn": "rewards:score"},
        "advantage": {"steps": {"kl_penalty": {"coef": {"init": 0.1, "target": 0.02, "horizon": 100}}}},
        "train_actor": {"optimizer": {"schedule": "linear", "warmup_steps": 2}},
    },
    "eval": {"every": 2, "data": {**BASE["data"], "path": "test.jsonl"}},
}
STEPS = 6


def copied(home: Path, name: str, target: Path, step: int) -> Path:
    """A copy of a run directory as it was when the checkpoint of `step` was its newest."""
    shutil.copytree(home / name, target, symlinks=True)
    for path in (target / "checkpoints").glob("step-??????"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return target


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A PPO run with every state there is: two roles, an adaptive coefficient, a schedule, evaluations."""
    file = write_run(home, "whole", PPO, {"steps": STEPS, "checkpoint": {"every": 1, "keep": 9}})
    finish(home, "run", str(file), name="whole")
    return home / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3], ids=["after an evaluation", "before one"])
def test_a_resumed_run_ends_with_the_same_numbers_and_the_same_bytes(whole: Path, tmp_path: Path, step: int) -> None:
    """An evaluation brings the generator's copy up to date before the checkpoint; else the next step does."""
    folder = copied(whole.parent, "whole", tmp_path / "moved", step)
    (folder / "metrics.jsonl").unlink()
    finish(whole.parent, "run", "--resume", str(folder), name="whole")
    expected = numbers(whole)
    assert numbers(folder) == {number: expected[number] for number in range(step, STEPS)}
    evals = {record["step"]: record["metrics"] for record in records(whole, "eval")}
    assert {record["step"]: record["metrics"] for record in records(folder, "eval")} == {
        number: metrics for number, metrics in evals.items() if number > step
    }
    last = f"checkpoints/step-{STEPS:06d}"
    files = [path.relative_to(whole) for path in (whole / last).rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.safetensors", "state.json"}
    for file in files:
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


def test_what_a_resumed_run_may_change(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    allowed = {
        "name": "another",
        "eval.every": 3,
        "checkpoint.keep": 5,
        "outputs.transcripts": 1,
        "runtime.lost_after_seconds": 99,
    }
    assert {name.partition(".")[0] for name in allowed} | {"steps"} == set(CHANGEABLE)
    prepared = prepare_resume(folder, [f"{name}={value}" for name, value in allowed.items()])
    assert (prepared.job.name, prepared.job.runtime.lost_after_seconds) == ("another", 99)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("seed=4", "seed"),
        ("batch.groups=4", "batch.groups"),
        ("data.shuffle=false", "data.shuffle"),
        ("params.actor_lr=1e-5", "params.actor_lr"),
        ("calls.train_actor.lr=1e-5", "calls.train_actor.lr"),
        ("staleness=1", "staleness"),
        ("cluster.devices=1", "cluster"),
        ("steps=9", "steps"),
    ],
)
def test_what_would_make_it_another_run_is_refused(whole: Path, tmp_path: Path, change: str, where: str) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    with pytest.raises(ConfigError) as refused:
        prepare_resume(folder, [change])
    texts = [str(problem) for problem in refused.value.problems]
    assert all(text.startswith("command line: $.") and "change" in text for text in texts), texts
    assert any(f"can't change `{where}`" in text or "depends on steps" in text for text in texts), texts


def test_overrides_that_a_resumed_run_could_not_follow_are_refused(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    with pytest.raises(ConfigError, match=r"\$.outputs.dir: a resumed run stays in its directory"):
        prepare_resume(folder, [f"outputs.dir={tmp_path}/other"])
    prepare_resume(folder, [f"outputs.dir={folder}"])
    with pytest.raises(ConfigError, match=r"\$.steps: 4 steps of the run are done already: it can't end after 3"):
        prepare_resume(folder, ["steps=3"])
    for change in ("allocation.train_actor.tp=2", "constraints.reserve=1", "memory.quantile=0.6"):
        with pytest.raises(ConfigError, match=r"keeps its plan(.|\n)*--replan") as refused:
            prepare_resume(folder, [change])
        assert [problem.where.path for problem in refused.value.problems] == [f"$.{change.partition('=')[0]}"]
    config = folder / "config.yaml"
    prepare_resume(folder, ["memory.quantile=0.95", "allocation.train_actor={}"])
    config.write_text(config.read_text().replace("quantile: 0.95", "quantile: 0.6"))
    with pytest.raises(ConfigError, match=r"config\.yaml:\d+: \$\.memory\.quantile: .*keeps its plan(.|\n)*--replan"):
        prepare_resume(folder, [])
    prepare_resume(folder, ["memory.quantile=0.95"])


def test_pins_written_into_the_run_file_by_hand_are_followed_by_another_plan_alone(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    config = folder / "config.yaml"
    lines = config.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("allocation:"))
    lines[place] = "allocation: {train_actor: {dp: 1, devices: 1}}"
    config.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=rf"config\.yaml:{place + 1}: \$\.allocation\.train_actor\..*keeps its plan"):
        prepare_resume(folder, [])
    plan = prepare_resume(folder, [], ResumeOptions(replan=True)).job.plan
    assert plan.allocations["train_actor"].layout.mesh.n_devices == 1


def test_what_can_not_be_resumed_says_why(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is not a run directory"):
        prepare_resume(tmp_path, [])
    folder = copied(whole.parent, "whole", tmp_path / "bare", 0)
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        prepare_resume(folder, [])
    job = (folder / "job.json").read_text()
    (folder / "job.json").write_text(re.sub(r'("format": )\d', r"\g<1>2", job))
    with pytest.raises(ConfigError, match="plan has format 2; this version reads format 6"):
        prepare_resume(folder, [])
    (folder / "job.json").write_text("{")
    with pytest.raises(ConfigError, match="the run can't be read"):
        prepare_resume(folder, [])
    folder = copied(whole.parent, "whole", tmp_path / "torn", 2)
    (folder / "checkpoints/step-000002/state.json").write_text("{")
    for path in (folder / "checkpoints").glob("step-*/actor/model.safetensors"):
        path.unlink()
    with pytest.raises(
        ConfigError, match=r"step-000001: \$: the checkpoint is damaged: actor/.* is missing"
    ) as refused:
        prepare_resume(folder, [])
    assert len(refused.value.problems) == 2, "each with its reason"


def test_a_damaged_checkpoint_is_passed_over_and_named(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    file = folder / "checkpoints/step-000004/critic/optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (folder / "checkpoints/step-000003/state.json").write_text("{")
    output = finish(whole.parent, "run", "--resume", str(folder), name="whole").output()
    assert re.search(r"step-000004 is damaged: critic/optimizer.safetensors is not what was written", output)
    assert re.search(r"step-000003 is damaged: state.json has 1 bytes", output)
    assert f"resuming from {folder}/checkpoints/step-000002" in output
    last = "checkpoints/step-000006/actor/model.safetensors"
    assert (folder / last).read_bytes() == (whole / last).read_bytes()
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names >= {"step-000003", "step-000004", "step-000003.damaged", "step-000004.damaged"}


def test_a_damaged_model_is_not_evaluated(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole.parent, "whole", tmp_path / "run", 3)
    (folder / "checkpoints/best").unlink(missing_ok=True)
    newest = folder / "checkpoints/step-000003"
    (newest / "actor/optimizer.safetensors").write_bytes(b"")
    assert model_folder(folder) == newest / "actor", "what only training reads is not looked at"
    with (newest / "actor/model.safetensors").open("r+b") as file:
        file.truncate(1000)
    shutil.copytree(newest, folder / "checkpoints/step-000009.partial")
    for path in (folder, newest, newest / "actor"):
        with pytest.raises(ConfigError) as refused:
            model_folder(path)
        (problem,) = refused.value.problems
        assert problem.where.file == str(newest)
        assert "is damaged: actor/model.safetensors has 1,000 bytes" in problem.text
        assert problem.hint == f"take another one: {folder}/checkpoints/step-000002"


def test_the_directory_is_ours_before_anything_in_it_is_read(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another run could write on between the choice of a checkpoint and the first step from it."""
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    read: list[str] = []

    def guarded(name: str) -> None:
        function = getattr(resume, name)

        def checked(*arguments: Any) -> Any:
            with pytest.raises(BlockingIOError), exclusive(RunFolder(folder)):
                pass
            read.append(name)
            return function(*arguments)

        monkeypatch.setattr(resume, name, checked)

    for name in ("read_job", "recover", "newest_intact", "check_run"):
        guarded(name)
    with open_run(None, ["checkpoint.keep=3"], RunOptions(resume=folder)) as prepared:
        assert prepared.resume == folder / "checkpoints/step-000004"
    assert read == ["read_job", "recover", "newest_intact", "check_run"]
    with exclusive(RunFolder(folder)), pytest.raises(ConfigError, match="another run is writing to"):  # noqa: SIM117
        with open_run(None, [], RunOptions(resume=folder)):
            pass


def test_data_that_have_changed_are_refused_with_the_file(whole: Path, tmp_path: Path) -> None:
    copy_home(whole.parent, tmp_path / "home")
    folder = tmp_path / "home/whole"
    for name in ("config.yaml", "job.json"):  # as if it had been begun here
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(str(whole.parent), str(tmp_path / "home")))
    prepare_resume(folder, [])
    for name, place in (("train.jsonl", "data"), ("test.jsonl", "eval.data")):
        file = tmp_path / "home" / name
        content = file.read_text()
        file.write_text(content.replace("1", "2", 1))
        with pytest.raises(ConfigError) as refused:
            prepare_resume(folder, [])
        (problem,) = refused.value.problems
        assert problem.where.path == f"$.{place}.path"
        assert f"{file} has changed since the run began: it has other bytes" in problem.text
        assert "put the file back, or go on with it as it is now: --new-data" in problem.hint
        prepare_resume(folder, [], ResumeOptions(new_data=True))
        if name == "test.jsonl":
            prepare_resume(folder, [f"eval.data.path={tmp_path}/home/train.jsonl"])
        file.write_text(content + content.splitlines(keepends=True)[0])
        with pytest.raises(ConfigError, match=r"it has [\d,]+ bytes, and had [\d,]+, and other samples would follow"):
            prepare_resume(folder, [])
        file.write_text(content)
    prepare_resume(folder, [])


def test_a_frozen_model_that_has_changed_is_refused_with_the_file(whole: Path, tmp_path: Path) -> None:
    """No checkpoint has its weights: the reference of what goes on would be another."""
    copy_home(whole.parent, tmp_path / "home")
    folder, weights = tmp_path / "home/whole", tmp_path / "home/model/model.safetensors"
    for name in ("config.yaml", "job.json"):  # as if it had been begun here
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(str(whole.parent), str(tmp_path / "home")))
    prepare_resume(folder, [])
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError) as refused:
        prepare_resume(folder, [])
    (problem,) = refused.value.problems
    assert problem.where.path == "$.models.ref.path" and "--new-data" in problem.hint
    assert f"{weights} of the frozen model 'ref' has changed since the run began: it has other bytes" in problem.text
    accepted = prepare_resume(folder, [], ResumeOptions(new_data=True))
    assert accepted.job.frozen_sums["ref"].keys() == {str(weights)}


def test_an_evaluation_of_a_run_that_was_moved_lies_next_to_it(whole: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved, symlinks=True)
    config = moved / "config.yaml"
    prepared = for_evaluation(prepare(config, [], None), moved)
    assert prepared.folder.root == tmp_path / "moved-eval"
    named = for_evaluation(prepare(config, [f"outputs.dir={tmp_path}/other"], None), moved)
    assert named.folder.root == tmp_path / "other-eval"


@pytest.mark.parametrize("machine", [Probe(1, 10**9), Probe(64, 10**12)], ids=["smaller", "larger"])
def test_another_machine_may_go_on_with_a_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Probe
) -> None:
    """Cores and memory are measured, not written: they are no part of what must be equal."""
    folder = copied(whole.parent, "whole", tmp_path / "run", 4)
    before = prepare_resume(folder, []).job
    monkeypatch.setattr("realgraph.run.requests.probe", lambda: machine)
    assert prepare_resume(folder, []).job == before
    with pytest.raises(ConfigError, match="can't change `cluster`"):
        prepare_resume(folder, ["cluster.memory_gb=3"])


N_MUTATIONS = 12
CONTROLS = bytes({*range(32), 127} - {*b"\n\t"})
FILES = ("job.json", "config.yaml", "metrics.jsonl", "costs.json", "plan.json", "trace.json", "state.json", MANIFEST)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_no_damage_to_a_file_of_a_run_gives_a_traceback(whole: Path, tmp_path: Path, name: str) -> None:
    """Each is refused with its place, passed over, or makes no difference to how the run goes on."""
    folder = copied(whole.parent, "whole", tmp_path / "run", 2)
    newest = folder / "checkpoints/step-000002"
    file = newest / name if name in ("state.json", MANIFEST) else folder / name
    without = CONTROLS if name == "config.yaml" else b""  # which the YAML reader has tests for
    content, kept = file.read_bytes(), shutil.copytree(newest, tmp_path / "kept")
    outcomes = {
        outcome
        for seed in range(N_MUTATIONS)
        for outcome in [outcome_of(folder, file, mutate(content, random.Random(f"{name} {seed}"), without))]
        if restored(newest, kept)
    }
    expected = {"plan.json": {"goes on"}, "state.json": {"passed over"}, MANIFEST: {"passed over"}}
    assert outcomes <= {"refused", "passed over", "goes on"}
    assert outcomes >= expected.get(name, set())


def outcome_of(folder: Path, file: Path, content: bytes) -> str:
    """The outcome of resuming with a damaged file, up to the start of the workers."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    file.write_bytes(content)
    try:
        with resumed(folder, []) as prepared:
            claim(prepared)
            check_rows(prepared)
    except ConfigError:
        return "refused"
    finally:
        for path, bytes_before in before.items():
            path.write_bytes(bytes_before)
    assert prepared.resume is not None
    return "goes on" if prepared.resume.name == "step-000002" else "passed over"


def check_rows(prepared: PreparedRun) -> None:
    """Do what a run does with its directory and its first rows before workers start."""
    folder, job = prepared.folder, prepared.job
    DataSet(job.data, {key.name: key.type for key in job.graph.inputs}, load_tokenizer(*tokenizer_source(job.graph)))
    costs = CostsFile(Planned(job.name, prepared.request, job.plan), folder.costs)
    costs.observe(RunStarted(job.name, job.graph.name, job.steps, 2, str(folder.root), ()))
    files = (MetricsFile(folder.metrics), TranscriptsFile(folder.transcripts), TraceFile(folder.trace))
    Observers((*files, costs)).close()


def restored(newest: Path, kept: Path) -> bool:
    """Put the checkpoint back for the next try."""
    for path in newest.parent.glob(f"{newest.name}*"):
        shutil.rmtree(path)
    shutil.copytree(kept, newest)
    return True
