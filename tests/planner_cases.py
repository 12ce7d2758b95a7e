"""Graphs, clusters and requests that the planner's tests share."""

from collections.abc import Iterable

from msgspec.structs import replace

from benchmarks.published_backends import in_eight_bits
from realgraph.graphs.errors import Where
from realgraph.graphs.graph import Edge, Graph, Key
from realgraph.graphs.keys import KeyType
from realgraph.graphs.maths import Loss
from realgraph.graphs.spec import Advantage, Function, Generate, Inference, ModelCall, ModelRole, Train
from realgraph.planner.costs.memory.memory import DType
from realgraph.planner.costs.setting import Setting
from realgraph.planner.inputs.cluster import Cluster, ClusterSpec, NodesSpec
from realgraph.planner.inputs.detect import Probe, resolve
from realgraph.planner.inputs.model_configs import known_models
from realgraph.planner.inputs.model_spec import ModelSpec, spec_from_config
from realgraph.planner.inputs.workload import Workload
from realgraph.planner.request.pins import Pin
from realgraph.planner.request.request import PlanRequest

MACHINE = Probe(cores=2, host_memory_bytes=24_000_000_000)
MIXED = resolve(
    ClusterSpec(nodes=2, devices=8, kind="H100-SXM", more=(NodesSpec(3, "A100-80"), NodesSpec(1, "H20", 4))), MACHINE
)


def known(name: str) -> ModelSpec:
    return spec_from_config(known_models()[name], Where())


def cluster(kind: str = "H100-SXM", devices: int = 8, nodes: int = 1) -> Cluster:
    return resolve(ClusterSpec(nodes=nodes, devices=devices, kind=kind), MACHINE)


def graph(
    calls: dict[str, ModelCall], data: Iterable[tuple[str, str]], roles: dict[str, ModelRole], staleness: int = 0
) -> Graph:
    """A compiled graph with these data edges; weight edges as the compiler draws them."""
    flows = tuple(data)
    edges = [Edge(producer, consumer, keys=(f"{producer}_{consumer}",)) for producer, consumer in flows]
    keys = {f"{producer}_{consumer}": _key(calls, producer, consumer) for producer, consumer in flows}
    reads = {name: tuple(key.name for key in keys.values() if name in key.consumers) for name in calls}
    writes = {name: tuple(key.name for key in keys.values() if name == key.producer) for name in calls}
    for name, call in calls.items():
        for train, trained in calls.items():
            if isinstance(trained, Train) and isinstance(call, Generate | Inference) and call.model == trained.model:
                slack = staleness if isinstance(call, Generate) else 0
                edges.append(Edge(train, name, role=call.model, distance=1 + slack))
    return Graph("test", calls, roles, keys, reads, writes, tuple(edges), samples_per_group=8)


def _key(calls: dict[str, ModelCall], producer: str, consumer: str) -> Key:
    """Samples of a generate call, a number a token of any other."""
    generated = KeyType("sample", "tokens") if isinstance(calls[producer], Generate) else KeyType("token", "float32")
    return Key(f"{producer}_{consumer}", generated, producer, (consumer,))


def ppo(dtype: DType = "bfloat16", staleness: int = 0) -> Graph:
    """Actor, critic and frozen reference with a reward function."""
    return graph(
        {
            "generate": Generate(model="actor"),
            "reward": Function(fn="f"),
            "ref": Inference(model="ref", output="logprobs", writes=("r",)),
            "values": Inference(model="critic", output="values", writes=("v",)),
            "advantage": Advantage(steps={}),
            "actor_train": Train(model="actor", loss=Loss({})),
            "critic_train": Train(model="critic", loss=Loss({})),
        },
        [
            *(("generate", user) for user in ("reward", "ref", "values", "actor_train", "critic_train")),
            *((maker, "advantage") for maker in ("reward", "ref", "values")),
            *(("advantage", train) for train in ("actor_train", "critic_train")),
        ],
        {
            "actor": ModelRole(trainable=True, dtype=dtype, path="x"),
            "ref": ModelRole(dtype=dtype, path="x"),
            "critic": ModelRole(trainable=True, head="value", dtype=dtype, path="x"),
        },
        staleness,
    )


def grpo(dtype: DType = "bfloat16") -> Graph:
    return graph(
        {
            "rollout": Generate(model="actor", n=8),
            "reward": Function(fn="f"),
            "advantage": Advantage(steps={}),
            "train": Train(model="actor", loss=Loss({})),
        },
        [("rollout", "reward"), ("reward", "advantage"), ("advantage", "train"), ("rollout", "train")],
        {"actor": ModelRole(trainable=True, dtype=dtype, path="x")},
    )


def request(
    algorithm: Graph,
    model: str = "Qwen/Qwen3-1.7B",
    machine: Cluster | None = None,
    pins: dict[str, Pin] | None = None,
    workload: Workload | None = None,
) -> PlanRequest:
    return PlanRequest(
        graph=algorithm,
        workload=workload or Workload(64, 8, 512, 1024, 400.0),
        cluster=machine or cluster(),
        models=dict.fromkeys(algorithm.models, known(model)),
        pins=pins or {},
    )


def eight_bit(setting: Setting, cache_bytes: int | None = None) -> Setting:
    """The setting with layers' products in 8 bits, and where it serves weights of one byte and such a cache."""
    return replace(setting, backend=in_eight_bits(setting.engine, setting.costs.fp8, cache_bytes))
