"""Routing replay: what generation keeps of its choices of experts, and what training does with them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from realgraph.graphs.check.compile import compile_graph
from realgraph.graphs.errors import ConfigError
from realgraph.graphs.facts import Facts
from realgraph.graphs.spec import ModelRole
from realgraph.planner.inputs.model_spec import choice_bytes
from realgraph.planner.options.calls import input_bytes
from realgraph.planner.request.engine_support import EngineSupport
from realgraph.run.requests import request_for, without_routes
from realgraph.run_file.compose import check_run
from realgraph.runtime.attention.sharing import share_prefixes
from realgraph.runtime.batch import Packed
from realgraph.runtime.engine import Completion, Request, RolloutLimits
from realgraph.runtime.generate.continuous_batch import ContinuousBatch
from realgraph.runtime.models.building import Start, build, fill
from realgraph.runtime.models.models import PackedModel, Wants
from realgraph.runtime.models.weights import whole
from realgraph.runtime.parallel.experts.kept import SequenceRoutes, TokenRoutes
from realgraph.runtime.parallel.experts.routing import record_of, route_dtype
from realgraph.runtime.parallel.groups import LayoutRanks
from realgraph.runtime.train.passes import PROXIMAL_LOGPROBS
from realgraph.runtime.worker.update_gate import PROBE_SAMPLES, GateProbe, unpacked
from tests import tiny
from tests.equivalence.training import LOSSES, Case, keep_norms_exact, minibatches, open_case, routed
from tests.planner_cases import request as request_of
from tests.rollouts import requests, run
from tests.strategies import rl_tree, spec_of, where

CPU = torch.device("cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer but one": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
}
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
SMALL = RolloutLimits(max_running=5, max_cache_tokens=160, prefill_tokens=16)  # long prompts in chunks; some wait


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = MODELS[request.param]
    return tiny.save(tmp_path_factory.mktemp("model"), kind, eos_token_id=None, **changes)


def model_of(folder: Path, dtype: Any = "float64", seed: int | None = None) -> PackedModel:
    model = build(ModelRole(dtype=dtype), str(folder), Start(CPU, seed=seed))
    if dtype == "float64":
        keep_norms_exact(model)
    return model


def packed(wanted: Sequence[Request], done: dict[int, Completion]) -> tuple[Packed, Tensor]:
    """The samples as a batch, and their routes."""
    rows = [torch.tensor([*one.prompt, *done[one.id].tokens]) for one in wanted]
    mask = torch.cat([torch.arange(len(row)) >= len(one.prompt) for one, row in zip(wanted, rows, strict=True)])
    routes = [done[one.id].routes for one in wanted]
    batch = Packed(torch.cat(rows), tuple(map(len, rows)), mask)
    return batch, torch.cat([one for one in routes if one is not None])


def own_choices(model: PackedModel, batch: Packed, given: Tensor | None = None) -> Tensor:
    """[T, layers, k]: the routers' own, in a pass over whole samples; or those given, where there are any."""
    record = record_of(model.network)
    assert record is not None
    record.note()
    with torch.no_grad():
        model.run(batch, Wants(routes=given))
    noted = record.noted()
    return torch.stack([noted[layer] for layer in range(record.n_layers)], 1)


def is_last(batch: Packed) -> Tensor:
    """[T] bool: the last token of each sample, which generation never computes."""
    last = torch.zeros(batch.n_tokens, dtype=torch.bool)
    last[torch.tensor(batch.lengths).cumsum(0) - 1] = True
    return last


def test_generation_keeps_the_choices_of_a_full_pass(folder: Path) -> None:
    """Through shared prompts, chunks of prompts, and sequences that lose their pages; at the very weights, replaying
    them gives the behaviour log-probabilities, and changes no bit."""
    model = model_of(folder)
    wanted = requests(random.Random(1), 12, longest=30, groups_of=3)
    engine = ContinuousBatch(model.network, SMALL, keeps_routes=True)
    done = run(engine, wanted)
    batch, routes = packed(wanted, done)
    assert routes.dtype == torch.uint8
    last, own = is_last(batch), own_choices(model, batch)
    assert torch.equal(routes[~last].long(), own[~last])
    assert (routes[last] == 4).all(), "no choice of 4 experts"
    replayed, plain = (model.run(batch, Wants(routes=given)).logprobs for given in (routes, None))
    assert replayed is not None
    assert plain is not None
    assert torch.equal(replayed, plain)
    behaviour = torch.cat([torch.tensor(done[one.id].logprobs, dtype=torch.float64) for one in wanted])
    close(replayed[batch.mask].detach(), behaviour)
    assert all(one.routes is None for one in run(ContinuousBatch(model.network, SMALL), wanted[:2]).values())


def test_tokens_that_are_computed_again_go_to_the_experts_that_they_have(folder: Path) -> None:
    """New weights come in the middle. Tokens from before, whose keys are made anew, keep their experts in it, so that
    training finds the distribution that each token was drawn from; a sample that begins later has its prompt's."""
    model, old, newer = model_of(folder), model_of(folder), model_of(folder, seed=3)
    prompt = tuple(range(5, 40))
    wanted = [Request(i, prompt, 12, seed=i) for i in range(4)]
    engine = ContinuousBatch(model.network, replace(SMALL, max_running=3), keeps_routes=True)
    engine.submit(wanted)
    for _ in range(6):
        assert not engine.step()
    tensors = {name: tensor.detach().clone() for name, tensor in newer.network.named_parameters()}
    engine.weights.take(whole(iter(tensors.items())))
    engine.weights_changed(1)
    engine.abort([2])
    done = run(engine, [])
    drawn = [done[i].versions.count(0) for i in (0, 1, 3)]
    assert min(drawn[:2]) > 1
    assert drawn[2] == 0
    batch, routes = packed([wanted[0], wanted[1], wanted[3]], done)
    computed = torch.tensor([len(prompt) - 1 + n for n in drawn])
    early, last = batch.positions() < computed[batch.sample_index()], is_last(batch)
    first = own_choices(old, batch)
    assert torch.equal(routes[early].long(), first[early])
    later = own_choices(newer, batch, torch.where(early[:, None, None], routes, 4))
    assert torch.equal(routes[~last].long(), later[~last])
    assert not torch.equal(first[~last], own_choices(newer, batch)[~last])
    versions = torch.cat([torch.tensor([-1] * len(prompt) + [*done[i].versions]) for i in (0, 1, 3)])
    drawn_at = [[0.0] * len(prompt) + [*done[i].logprobs] for i in (0, 1, 3)]
    behaviour = torch.tensor([each for row in drawn_at for each in row], dtype=torch.float64)
    for version, trained in enumerate((old, newer)):
        found = trained.run(batch, Wants(routes=routes)).logprobs
        assert found is not None
        close(found[versions == version].detach(), behaviour[versions == version])


def test_a_token_has_one_choice_and_a_prompt_has_it_for_all_its_samples() -> None:
    numbers = np.arange(250, dtype=np.uint8)[:, None, None]
    prompt = TokenRoutes(numbers[:0])
    one, other = (SequenceRoutes(4, prompt, numbers[:0]) for _ in range(2))
    one.take(0, numbers[10:12])
    one.take(2, numbers[12:14])
    assert one.known(1, 4).ravel().tolist() == [11, 12, 13]
    assert other.known(0, 4).ravel().tolist() == [10, 11, 12]
    other.take(3, numbers[20:21])
    one.take(0, numbers[100:200])
    assert one.kept.ravel().tolist() == [*range(10, 14), *range(104, 200)]
    assert one.known(50, 200).ravel().tolist() == [*range(150, 200)]
    assert one.known(100, 101).size == 0
    assert other.kept.ravel().tolist() == [10, 11, 12, 20]


def given_choices(model: Any, given: list[Tensor]) -> None:
    """Have each router of a transformers model take the experts [T, k] that are given for its layer, one after the
    other, weighed by its own probabilities; norms and routers compute in float64."""
    keep_norms_exact(model)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for module, experts in zip(routers, given, strict=True):
        module.forward = partial(_route, module, experts)


def _route(module: Any, given: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, module.weight)
    weights = logits.softmax(-1).gather(-1, given)
    total = weights.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else 1
    return logits, weights / total, given


def test_other_weights_are_trained_with_the_kept_choices(folder: Path, tmp_path: Path) -> None:
    """Log-probabilities and every gradient equal those of transformers with the routers' choices put in its place."""
    wanted = requests(random.Random(4), 3, longest=20)
    done = run(ContinuousBatch(model_of(folder).network, keeps_routes=True), wanted)
    batch, routes = packed(wanted, done)
    tensors = {name: t.detach() for name, t in model_of(folder).network.named_parameters()}
    draw = torch.Generator().manual_seed(0)
    moved = {n: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype) for n, t in tensors.items()}
    model = model_of(folder)
    with torch.no_grad():
        fill(model, moved)
    model.network.save_pretrained(tmp_path)
    own = own_choices(model, batch)
    assert not torch.equal(own, routes.long()), "the routers would choose otherwise"
    given = torch.where(routes < 4, routes.long(), own)
    outputs = model.run(batch, Wants(routes=routes))
    assert outputs.logprobs is not None
    plain = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": torch.float64}
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **plain)
    expected = []
    for tokens, choices in zip(
        torch.split(batch.tokens, list(batch.lengths)), torch.split(given, list(batch.lengths)), strict=True
    ):
        given_choices(reference, list(choices.unbind(1)))
        distribution = reference(tokens[None]).logits[0].log_softmax(-1)[:-1]
        expected += [distribution.new_zeros(1), distribution.gather(-1, tokens[1:, None])[:, 0]]
    close(outputs.logprobs, torch.cat(expected))
    factors = torch.randn(batch.n_tokens, generator=draw, dtype=torch.float64)
    torch.autograd.backward((outputs.logprobs * factors).sum())
    torch.autograd.backward((torch.cat(expected) * factors).sum())
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    by_file = revert_weight_conversion(reference, grads)
    for name, parameter in model.network.named_parameters():
        assert parameter.grad is not None, name
        scale = float(by_file[name].abs().max())
        torch.testing.assert_close(parameter.grad, by_file[name], rtol=1e-10, atol=1e-10 * scale + 1e-14, msg=name)
    record = record_of(model.network)
    assert record is not None
    assert outputs.expert_load is not None
    counts = torch.stack([torch.bincount(one.flatten(), minlength=4) for one in given.unbind(1)])
    assert torch.equal(outputs.expert_load[:-2].view(record.n_layers, 4), counts.double()), "the load is that of these"


def test_proximal_logprobs_are_those_of_the_kept_choices(tmp_path: Path) -> None:
    tiny.save(tmp_path / "qwen3_moe", "qwen3_moe")
    case = Case("qwen3_moe", "replayed")
    engine = open_case(case, tmp_path, LayoutRanks.alone(CPU))
    batches = minibatches(case.dtype, 0)
    given = [routed(batch, engine) for batch in batches]
    parts = engine.passes.with_proximal(engine.passes.parts(LOSSES["rl"], given, 0), 0.8)
    for part, batch, bare in zip(parts, given, batches, strict=True):
        found = part.batch.token_keys[PROXIMAL_LOGPROBS][batch.mask]
        expected, own = (engine.passes.inference(one, Wants("logprobs", 0.8))[batch.mask] for one in (batch, bare))
        close(found, expected)
        assert not torch.allclose(found, own)


def test_equal_tokens_that_went_to_other_experts_are_computed_apart(folder: Path) -> None:
    """On a CPU equal beginnings are computed once, as far as their choices are equal, too."""
    model = model_of(folder, "float32")
    one = tiny.batch([9])
    batch = Packed(one.tokens.repeat(2), (9, 9), torch.ones(18, dtype=torch.bool))
    record = record_of(model.network)
    assert record is not None
    routes = torch.stack([torch.randperm(4)[:2] for _ in range(18 * record.n_layers)]).view(18, record.n_layers, 2)
    routes = routes.to(torch.uint8)
    routes[9:13] = routes[:4]
    routes[13] = routes[4].flip(-1)
    shared = share_prefixes(batch, [9, 9], routes)
    assert shared is not None
    assert len(shared.kept) == 14
    assert (shared.place[:9] == shared.place[9:]).tolist() == [True] * 4 + [False] * 5
    found = model.run(batch, Wants(routes=routes)).logprobs
    parts = [model.run(one, Wants(routes=half)).logprobs for half in torch.split(routes, 9)]
    assert found is not None
    torch.testing.assert_close(found, torch.cat([part for part in parts if part is not None]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[6:9], found[15:])


def test_choices_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    batch, model = tiny.batch([4, 3]), model_of(folder)
    record = record_of(model.network)
    assert record is not None
    with pytest.raises(ValueError, match=rf"have the shape \[7, 9, 2\], for this model \[7, {record.n_layers}, 2\]"):
        model.run(batch, Wants(routes=torch.zeros((7, 9, 2), dtype=torch.uint8)))
    dense = build(ModelRole(), str(tiny.save(tmp_path, "llama")), Start(CPU))
    with pytest.raises(ValueError, match="routes to experts, and the model has no experts"):
        dense.run(batch, Wants(routes=torch.zeros((7, 2, 2), dtype=torch.uint8)))
    with pytest.raises(ValueError, match="routing_replay is for mixtures of experts, and this model is none"):
        ContinuousBatch(dense.network, keeps_routes=True)


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (255, 1), (256, 2), (32767, 2), (32768, 4)])
def test_numbers_take_the_smallest_integers_that_hold_them_and_none(experts: int, size: int) -> None:
    assert choice_bytes(experts) == route_dtype(experts).itemsize == size
    assert torch.iinfo(route_dtype(experts)).max >= experts


@pytest.mark.parametrize("layers", [0, 3])
def test_probes_travel_with_their_routes(layers: int) -> None:
    draw = torch.Generator().manual_seed(0)
    routes = torch.randint(300, (PROBE_SAMPLES, 7, layers, 2), generator=draw) if layers else None
    tokens = torch.randint(2**40, (PROBE_SAMPLES, 7), generator=draw)
    logprobs = torch.rand((PROBE_SAMPLES, 2), generator=draw, dtype=torch.float64)
    probe = GateProbe(tokens, logprobs, "the SGLang server http://[::1]:30000 of worker 3", 7, routes)
    for found in unpacked(torch.cat([probe.packed(), probe.packed()])):
        assert (found.engine, found.version) == (probe.engine, probe.version)
        assert torch.equal(found.tokens, probe.tokens)
        assert torch.equal(found.logprobs, probe.logprobs)
        assert (found.routes is None) == (routes is None)
        assert routes is None or (found.routes is not None and found.routes.tolist() == routes.tolist())
    assert unpacked(torch.zeros(0, dtype=torch.float64)) == []


# --- graphs, plans and run files --------------------------------------------------------------------------------------


def graph_of(*, replays: bool) -> Any:
    tree = rl_tree()
    tree["models"]["actor"]["routing_replay"] = replays
    tree["calls"]["old"] = {"kind": "inference", "model": "actor", "output": "logprobs", "writes": ["old_logprobs"]}
    return compile_graph(spec_of(tree), where, Facts())


def test_calls_of_the_role_read_the_key_and_nobody_else() -> None:
    on, off = graph_of(replays=True), graph_of(replays=False)
    assert "routes" not in off.keys
    key = on.keys["routes"]
    assert (str(key.type), key.producer, set(key.consumers)) == ("token experts", "rollout", {"train", "old"})
    assert {name: key for name, key in on.keys.items() if name != "routes"}.keys() == off.keys.keys()


def test_the_planner_counts_the_bytes_that_travel() -> None:
    """128 experts of which 8 a token in 48 layers: 384 bytes a token."""
    on, off = (request_of(graph_of(replays=replays), "Qwen/Qwen3-30B-A3B") for replays in (True, False))
    work = on.workload
    tokens = work.n_samples * (work.expected_prompt_tokens + work.mean_new_tokens)
    for call, more in {"train": 384, "old": 384, "ref_logp": 0}.items():
        assert input_bytes(on, call) - input_bytes(off, call) == pytest.approx(more * tokens)


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
    file = tmp_path / "run.yaml"
    file.write_text(
        "graph: grpo\nmodels:\n  actor:\n    path: Qwen/Qwen3-0.6B\n    routing_replay: true\n"
        "data: {path: rows.jsonl, columns: {prompt: question, answer: answer}}\n"
        "batch: {groups: 8, max_new_tokens: 64}\ncluster: {devices: 8, kind: H100-SXM}\n"
    )
    with pytest.raises(ConfigError) as caught:
        request_for(check_run(file))
    (problem,) = caught.value.problems
    assert (problem.where.path, problem.where.line) == ("$.models.actor.routing_replay", 5)
    assert problem.text == "routing_replay is for mixtures of experts, and Qwen/Qwen3-0.6B (qwen3) is none"
    assert problem.hint == "leave it out, or take a Qwen3-MoE, Mixtral, gpt-oss or DeepSeek-V3 model"
    file.write_text(file.read_text().replace("Qwen3-0.6B", "Qwen3-30B-A3B"))
    checked = check_run(file)
    found = request_for(checked)
    assert not list(without_routes(checked, found.models, found.engine))
    silent = msgspec.structs.replace(EngineSupport(), name="other engines")
    (problem,) = without_routes(checked, found.models, silent)
    assert problem.text == "other engines do not tell which experts a token went to, so there is nothing to replay"
    assert problem.where.line == 5


def test_a_dense_model_has_no_load_to_balance(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 20)
    file = tmp_path / "run.yaml"
    file.write_text(
        "graph: grpo\nmodels: {actor: {path: Qwen/Qwen3-0.6B}}\ndata: {path: rows.jsonl}\nbatch: {groups: 8}\n"
        "cluster: {devices: 8, kind: H100-SXM}\n"
        "calls: {train: {loss: {terms: {balance: {kind: load_balance, coef: 0.001}}}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        request_for(check_run(file))
    (problem,) = caught.value.problems
    assert (problem.where.path, problem.where.line) == ("$.calls.train.loss.terms.balance", 6)
    assert problem.text == "load_balance is for mixtures of experts, and the model of 'actor' is none"
    file.write_text(file.read_text().replace("Qwen3-0.6B", "Qwen3-30B-A3B"))
    request_for(check_run(file))
