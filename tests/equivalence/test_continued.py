"""A training that is written under one layout goes on under any other as if one process had never stopped."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from realgraph.planner.plan.layout import DeviceMesh, Layout
from realgraph.runtime.parallel.groups import LayoutRanks
from tests.equivalence.comparing import check_gradients, check_metrics, check_states, compare
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.training import Case, Training, Watched, call_of, minibatches, note_end, open_case, ranks_of
from tests.ranks import RankProcesses

MODEL = "qwen3_moe deep"  # four layers, one of them without experts
EIGHT = (
    "tp4",
    "dp2 cp2",
    "fsdp2 tp2",
    "pp2 uneven",
    "fsdp2 pp2 twice",
    "ep4 tp2",
    "ep2 fsdp4",
    "ep2 tp2 pp2",
)
TOLERANCE = 1e-10


def case_of(name: str) -> Case:
    return Case(MODEL, "rl", "float64", LAYOUTS[name], epochs=1)


def train_once(engine: Watched, case: Case, number: int) -> None:
    """A train call of one optimizer step. number: of the call, each with a batch of its own that all ranks share."""
    ranks, batch = engine.ranks.dp, minibatches(case.dtype, 2 * number)[0]
    share = batch.select(range(ranks.rank, batch.n_samples, ranks.size))
    engine.seen = Training()
    engine.seen.steps.append(engine.train(msgspec.structs.replace(call_of(case), minibatches=1), [share]))
    note_end(engine)


def write(ranks: LayoutRanks, case: Case, models: Path, target: Path) -> None:
    """One worker's part: a step, and a checkpoint."""
    here = ranks_of(case, ranks)
    if here is None:
        return
    engine = open_case(case, models, here)
    engine.watch()
    train_once(engine, case, 0)
    engine.save(target)


def go_on(ranks: LayoutRanks, case: Case, models: Path, written: Mapping[str, Path]) -> dict[str, Training] | None:
    """One worker's part: the step behind each of the checkpoints. None on a worker that the layout leaves out."""
    here = ranks_of(case, ranks)
    if here is None:
        return None
    engine, found = open_case(case, models, here), {}
    engine.watch()
    for name, folder in written.items():
        engine.load(folder)
        train_once(engine, case, 1)
        found[name] = engine.seen
    return found


@pytest.fixture(scope="module")
def written(four: RankProcesses, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by the layout that wrote them."""
    folders = {name: tmp_path_factory.mktemp("written") / "checkpoint" for name in EIGHT}
    for name, folder in folders.items():
        four.run(write, case_of(name), models, folder)
    return folders


@pytest.fixture(scope="module")
def uninterrupted(models: Path) -> Watched:
    """One process after the first step."""
    case = Case(MODEL, "rl", "float64", Layout(DeviceMesh(0, 1)), epochs=1)
    engine = open_case(case, models, LayoutRanks.alone(torch.device("cpu")))
    engine.watch()
    train_once(engine, case, 0)
    return engine


@pytest.fixture(scope="module")
def logprobs(uninterrupted: Watched) -> torch.Tensor:
    """Those of a batch, by its weights after that step."""
    return uninterrupted.inference(minibatches("float64", 4)[0], "logprobs", 1.0)


@pytest.fixture(scope="module")
def second_step(uninterrupted: Watched, logprobs: torch.Tensor) -> Training:
    """The step behind it."""
    train_once(uninterrupted, Case(MODEL, "rl", "float64", epochs=1), 1)
    return uninterrupted.seen


@pytest.mark.slow
@pytest.mark.parametrize("read", EIGHT)
def test_training_goes_on_under_every_other_layout(
    four: RankProcesses, models: Path, written: dict[str, Path], second_step: Training, read: str
) -> None:
    case = case_of(read)
    others = {name: folder for name, folder in written.items() if name != read}
    found = [one for one in four.run(go_on, case, models, others) if one is not None]
    assert len(found) == case.layout.mesh.n_devices
    assert all(one.keys() == others.keys() for one in found)
    for name in others:
        here = [one[name] for one in found]
        check_metrics(case, here, second_step, TOLERANCE)
        check_gradients(case, here, second_step, TOLERANCE)
        check_states(case, here, second_step, TOLERANCE)


def test_transformers_computes_the_same_from_every_one(written: dict[str, Path], logprobs: torch.Tensor) -> None:
    batch = minibatches("float64", 4)[0]
    for name, folder in written.items():
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        found = []
        with torch.no_grad():
            for tokens in torch.split(batch.tokens, list(batch.lengths)):
                distribution = network(tokens[None]).logits[0].log_softmax(-1)[:-1]
                found += [distribution.new_zeros(1), distribution.gather(-1, tokens[1:, None])[:, 0]]
        compare({"logprobs": torch.cat(found).numpy()}, {"logprobs": logprobs.numpy()}, 1e-5, name)
