"""Two ranks compute what one computes: replicated and sharded, ragged and empty shares, several optimizer steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from realgraph.graphs.maths import KL, Decoupled, Entropy, Loss, PolicyGradient, SequenceMean, TokenMean, Value
from realgraph.graphs.spec import ModelRole, Optimizer, Train
from realgraph.planner.plan.layout import DeviceMesh, Layout, Recompute
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import TrainOptions, TrainSettings
from realgraph.runtime.logprob_gap import LogprobGap
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.collectives.rendezvous import CollectiveError
from realgraph.runtime.parallel.groups import LayoutRanks, Ranks
from realgraph.runtime.train.engine import TorchTrainEngine, open_engine
from realgraph.runtime.train.errors import NumericsError
from realgraph.runtime.wire.metrics import Metric, merge
from tests import tiny
from tests.ranks import RankProcesses, joined

Sharding = Literal["replicated", "fsdp"]
OPTIMIZER = Optimizer(weight_decay=0.01, schedule="cosine", warmup_steps=2, max_grad_norm=1.0)
LOSSES = {
    "lm": Loss(
        {
            "policy": PolicyGradient(off_policy=Decoupled(cap=1e6)),
            "kl": KL(to="ref_logprobs", coef=0.1),
            "entropy": Entropy(coef=0.01),
        },
        SequenceMean(),
    ),
    "value": Loss({"value": Value(clip=None)}, TokenMean()),
}
N_STEPS = 2


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "tied": tiny.save(base / "tied", "qwen3"),
        "untied": tiny.save(base / "untied", "llama"),
        "gemma2": tiny.save(base / "gemma2", "gemma2"),
    }


def call(head: str) -> Train:
    return Train(
        model="actor", loss=LOSSES[head], lr=1e-2, optimizer=OPTIMIZER, minibatches=2, epochs=2, temperature=0.8
    )


def minibatches(step: int, dtype: str) -> list[Packed]:
    """Two epochs of two mini-batches; samples 0 and 1 of the second have an empty mask."""
    batches = []
    for i in range(2):
        batch = tiny.batch(tiny.lengths(6, 24, 10 * step + i), 10 * step + i, dtype=getattr(torch, dtype))
        batches.append(batch)
    mask = batches[1].mask.clone()
    mask[: sum(batches[1].lengths[:2])] = False
    second = batches[1]
    batches[1] = Packed(
        second.tokens, second.lengths, mask, (6, 7, 8, 9, 10, 11), second.groups, second.token_keys, second.sample_keys
    )
    return batches * 2


def shares(batches: list[Packed], ranks: LayoutRanks, step: int) -> list[Packed]:
    """Ragged: the first mini-batch is split 5 to 1, or 6 to 0; of the second, rank 1 gets those without a mask."""
    first = [[0, 1, 2, 4, 5], [3]] if step % 2 else [[0, 1, 2, 3, 4, 5], []]
    second = [[2, 3, 4, 5], [0, 1]]
    if ranks.dp.size == 1:
        return batches
    return [batch.select((second if i % 2 else first)[ranks.dp.rank]) for i, batch in enumerate(batches)]


def engine(ranks: LayoutRanks, folder: Path, role: ModelRole, sharding: Sharding, **changes: Any) -> TorchTrainEngine:
    settings = TrainSettings(**{"max_tokens_per_microbatch": 40, "optimizer": OPTIMIZER, "total_steps": 12, **changes})
    return open_engine(
        role, str(folder), Layout(DeviceMesh(0, ranks.dp.size), dp=ranks.dp.size, sharding=sharding), ranks, settings
    )


def role_of(head: Any, dtype: Any, **changes: Any) -> ModelRole:
    return ModelRole(trainable=True, head=head, dtype=dtype, **changes)


def train(
    ranks: LayoutRanks, folder: Path, role: ModelRole, sharding: Sharding, recompute: Recompute = "none"
) -> tuple[list[dict[str, Metric]], dict[str, Any]]:
    """Metrics of each step and the weights after the last, as numpy (tensors would travel by file descriptors)."""
    one = engine(ranks, folder, role, sharding, skip_idle=False)
    if role.head == "value":
        one.load_weights(whole(iter([(n, t + 0.1 if n == "score.weight" else t) for n, t in one.weights()])), 0)
    metrics = []
    for step in range(N_STEPS):
        batches = shares(minibatches(step, role.dtype), ranks, step)
        metrics.append(one.train(call(role.head), batches, TrainOptions(recompute)))
    return metrics, {name: tensor.double().numpy() for name, tensor in one.weights()}


def merged(per_rank: list[dict[str, Metric]]) -> dict[str, float]:
    total: dict[str, Metric] = {}
    for metrics in per_rank:
        merge(total, metrics)
    return {name: metric.value for name, metric in total.items()}


def close(a: Any, b: Any, tolerance: float) -> bool:
    scale = max(float(abs(b).max()), 1e-30)
    return float(abs(a - b).max()) <= tolerance * scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "head", "dtype", "sharding", "recompute"),
    [
        ("tied", "lm", "float64", "replicated", "none"),
        ("tied", "lm", "float64", "fsdp", "none"),
        ("untied", "lm", "float64", "fsdp", "selective"),
        ("untied", "value", "float64", "replicated", "none"),
        ("untied", "value", "float64", "fsdp", "full"),
        ("tied", "lm", "float32", "replicated", "full"),
        ("gemma2", "lm", "float32", "fsdp", "selective"),
        ("untied", "value", "float32", "fsdp", "none"),
    ],
)
def test_two_ranks_equal_one(
    two: RankProcesses,
    folders: dict[str, Path],
    model: str,
    head: str,
    dtype: str,
    sharding: Sharding,
    recompute: Recompute,
) -> None:
    role = role_of(head, dtype)
    expected, weights = train(LayoutRanks.alone(torch.device("cpu")), folders[model], role, "replicated")
    found = two.run(train, folders[model], role, sharding, recompute)
    for step in range(N_STEPS):
        one, both = merged([expected[step]]), merged([metrics[step] for metrics, _ in found])
        assert one.keys() == both.keys()
        rounding = 1e-4 if step else 1e-5  # which moves the weights apart in each step
        for name in one:
            tolerance = 1e-12 if dtype == "float64" else 1e-4 if name == "ratio_max" else rounding
            assert both[name] == pytest.approx(one[name], rel=tolerance, abs=tolerance), (step, name)
    for _, ours in found:
        assert ours.keys() == weights.keys()
        for name in weights:
            assert close(ours[name], weights[name], 1e-12 if dtype == "float64" else 1e-3), name


def looked_at(ranks: LayoutRanks, folder: Path, sharding: Sharding, looks: bool) -> tuple[dict[str, Any], list[bool]]:
    """Weights after two calls, in whose middle the engine infers; whether they were those before the call each time."""
    one, same = engine(ranks, folder, role_of("lm", "float64"), sharding), list[bool]()
    for step in range(2):
        batches = shares(minibatches(step, "float64"), ranks, step)
        before = one.inference(batches[0], "logprobs", 1.0)

        def look(before: torch.Tensor = before, batch: Packed = batches[0]) -> None:
            same.append(torch.equal(one.inference(batch, "logprobs", 1.0), before))

        one.train(call("lm"), batches, TrainOptions(before_step=look if looks else None))
    return {name: tensor.double().numpy() for name, tensor in one.weights()}, same


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_weights_are_looked_at_before_they_change_and_no_number_does(
    two: RankProcesses, folders: dict[str, Path], sharding: Sharding
) -> None:
    """Before the first step of a call the last weights are there; later ones see what has been trained."""
    plain, looked = (two.run(looked_at, folders["tied"], sharding, looks) for looks in (False, True))
    for (expected, _), (found, same) in zip(plain, looked, strict=True):
        assert all((found[name] == expected[name]).all() for name in expected)
        assert len(same) % 2 == 0 and same[0] and same[len(same) // 2] and not same[-1]


def save(ranks: LayoutRanks, folder: Path, role: ModelRole, sharding: Sharding, target: Path) -> None:
    one = engine(ranks, folder, role, sharding)
    one.train(call(role.head), shares(minibatches(0, role.dtype), ranks, 0))
    one.save(target)


def resume(ranks: LayoutRanks, folder: Path, role: ModelRole, sharding: Sharding, source: Path) -> tuple[Any, ...]:
    """(loss of the second step, version, optimizer steps, weights) of an engine that begins from a checkpoint."""
    one = engine(ranks, folder, role, sharding)
    one.load(source)
    metrics = one.train(call(role.head), shares(minibatches(1, role.dtype), ranks, 1))
    weights = {name: tensor.double().numpy() for name, tensor in one.weights()}
    return metrics.get("loss"), one.version, one.optimizer_steps, weights


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_a_checkpoint_knows_no_layout(
    two: RankProcesses, folders: dict[str, Path], tmp_path: Path, sharding: Sharding, dtype: str
) -> None:
    role = role_of("lm", dtype)
    two.run(save, folders["tied"], role, sharding, tmp_path / "both")
    one = LayoutRanks.alone(torch.device("cpu"))
    save(one, folders["tied"], role, "replicated", tmp_path / "one")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == names
    expected = resume(one, folders["tied"], role, "replicated", tmp_path / "both")
    for found in two.run(resume, folders["tied"], role, sharding, tmp_path / "both"):
        assert found[1:3] == expected[1:3] == (2, 8)
        assert found[0] is None or found[0].value == pytest.approx(
            expected[0].value, rel=1e-11 if dtype == "float64" else 0.02
        )
        for name, weight in expected[3].items():
            assert close(found[3][name], weight, 1e-12 if dtype == "float64" else 0.02), name


def refuse(ranks: LayoutRanks, folder: Path, sharding: Sharding, what: str) -> tuple[str, list[int], bool]:
    """The error that is raised where rank 0 alone has the bad sample, and if the weights stayed as they were."""
    one = engine(ranks, folder, role_of("lm", "float32"), sharding, max_logprob_gap=0.5 if what == "gap" else None)
    before = [tensor.clone() for _, tensor in one.weights()]
    batches = [batch.select([ranks.dp.rank, ranks.dp.rank + 2]) for batch in minibatches(0, "float32")]
    if ranks.dp.rank == 0:
        poisoned = batches[0].token_keys["advantages"].clone()
        poisoned[batches[0].lengths[0] :] = float("nan") if what == "nan" else 0.0
        keys = {**batches[0].token_keys, "advantages": poisoned}
        batches[0] = Packed(batches[0].tokens, batches[0].lengths, batches[0].mask, batches[0].samples, (), keys)
    try:
        one.train(call("lm"), batches)
    except (NumericsError, LogprobGap) as error:
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, one.weights(), strict=True))
        return str(error), list(getattr(error, "samples", ())), same
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
@pytest.mark.parametrize("what", ["nan", "gap"])
def test_all_ranks_refuse_together(two: RankProcesses, folders: dict[str, Path], sharding: Sharding, what: str) -> None:
    found, other = two.run(refuse, folders["tied"], sharding, what)
    assert found == other
    text, samples, same = found
    assert same
    if what == "nan":
        assert "loss is nan" in text
        assert 2 in samples  # rank 1 names it too
    else:
        assert "nats away" in text


def fill_disk(ranks: LayoutRanks, folder: Path, sharding: Sharding, target: Path) -> str:
    import resource

    one = engine(ranks, folder, role_of("lm", "float32"), sharding)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, old[1]))
    try:
        one.save(target)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    raise AssertionError("a full disk was not noticed")


@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_a_full_disk_is_an_error_of_each_rank_that_can_not_write_its_share(
    two: RankProcesses, folders: dict[str, Path], tmp_path: Path, sharding: Sharding
) -> None:
    for text in two.run(fill_disk, folders["tied"], sharding, tmp_path / "full"):
        assert "File too large" in text
        assert "model.safetensors" in text


def infer(ranks: LayoutRanks, folder: Path, sharding: Sharding) -> list[Any]:
    """Rank 0 has all samples, rank 1 none: sharded ranks still have to pass together."""
    role = ModelRole(head="lm")
    one = engine(ranks, folder, role, sharding, optimizer=None)
    batch = minibatches(0, "float32")[0]
    mine = batch if ranks.dp.rank == 0 else batch.select([])
    return [one.inference(mine, "logprobs", 0.7).numpy(), one.adam]


@pytest.mark.parametrize("sharding", ["replicated", "fsdp"])
def test_a_frozen_role_infers_on_uneven_ranks(two: RankProcesses, folders: dict[str, Path], sharding: Sharding) -> None:
    expected, _ = infer(LayoutRanks.alone(torch.device("cpu")), folders["gemma2"], "replicated")
    (found, adam), (nothing, _) = two.run(infer, folders["gemma2"], sharding)
    assert adam is None
    assert nothing.size == 0
    assert close(found, expected, 1e-6)


def step_out(ranks: LayoutRanks) -> str:
    """Rank 1 stays away from a collective of a group with a short deadline."""
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    short = Ranks(ranks.device, group, "workers 0 to 1")
    if ranks.dp.rank == 1:
        return ""
    try:
        short.add(torch.ones(3))
    except CollectiveError as error:
        return str(error)
    raise AssertionError("the missing rank was not noticed")


def sum_in_meshes(ranks: LayoutRanks) -> list[float]:
    """Each mesh's sum of 10^worker, seen from its own workers; -1 elsewhere."""
    found = []
    (groups,) = joined
    for mesh in MESHES:
        if ranks.dp.rank in mesh.devices:
            found.append(float(groups.ranks(mesh).add(torch.tensor(10.0**ranks.dp.rank, dtype=torch.float64))))
        else:
            with pytest.raises(KeyError):
                groups.ranks(mesh)
            found.append(-1.0)
    return found


MESHES = (DeviceMesh(1, 2), DeviceMesh(0, 2), DeviceMesh(0, 3))


def test_every_mesh_has_its_own_group() -> None:
    processes = RankProcesses(3, [Layout(mesh, dp=mesh.n_devices) for mesh in MESHES])
    try:
        found = processes.run(sum_in_meshes)
    finally:
        processes.close()
    assert found == [[-1.0, 11.0, 111.0], [110.0, 11.0, 111.0], [110.0, -1.0, 111.0]]


def test_a_missing_rank_is_an_error_within_the_deadline(two: RankProcesses) -> None:
    text, _ = two.run(step_out)
    assert text.startswith("all-reduce over workers 0 to 1 failed")


def lose_a_peer(ranks: LayoutRanks) -> tuple[str, str]:
    """Rank 1 stays away from a gather that torch itself starts; the kind of failure that rank 0 reports, and why."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import DTensor, Shard

    from realgraph.runtime.worker.failures import failure

    group = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    mesh = TorchMesh.from_group(group, "cpu")
    tensor = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
    if ranks.dp.rank == 1:
        return "", ""
    try:
        tensor.full_tensor()
    except RuntimeError as error:
        failed = failure(0, "rollout", error)
        return failed.kind, failed.error
    return "", "nothing was raised"


def test_a_lost_peer_is_seen_in_gathers_of_torch_too(two: RankProcesses) -> None:
    """The master then waits for the end of the worker that explains the failure of the others."""
    (kind, text), _ = two.run(lose_a_peer)
    assert kind == "worker", text
    assert "RuntimeError" in text


def test_an_error_of_the_model_is_no_lost_peer() -> None:
    from realgraph.runtime.worker.failures import failure

    with pytest.raises(RuntimeError) as caught:
        torch.mv(torch.ones(2, 2), torch.ones(3))
    assert failure(0, "train", caught.value).kind == "call"
