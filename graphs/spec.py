"""The graph language: what a graph file may say. Typed and immutable; knows neither files nor rules."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from realgraph.graphs.maths import Fraction, Loss, NonNegative, Positive, Step

FORMAT = 1  # version of the graph and run file format

Count = Annotated[int, Meta(ge=1)]
Switch = bool | int | float | str | None  # `when`: an interpolated value; false, 0, '' and null switch off


class ModelRole(Struct, frozen=True, forbid_unknown_fields=True):
    """One role of a model. `path` is a Hugging Face directory or Hub id; `init` takes another role's path."""

    trainable: bool = False
    path: str | None = None
    revision: str | None = None
    init: str | None = None
    head: Literal["lm", "value", "score"] = "lm"
    when: Switch = True
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    master_dtype: Literal["float32", "float64"] | None = (
        None  # of the optimizer's copy; default float32, float64 in float64
    )
    gradient_checkpointing: bool = False
    ema_rate: Fraction | None = None


class Optimizer(Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW (arXiv:1711.05101) and its schedule. It belongs to the role: train calls of one role must agree on it."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Meta(ge=0)] = 0  # optimizer steps
    final_lr_fraction: Fraction = 0.0  # of lr, at the end of the schedule


class _Call(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A model or function call. Edges follow from its keys. `when` switches the call off where it is falsy."""


class Generate(_Call, frozen=True, tag="generate"):
    """Sample `n` responses of a role to each prompt; writes tokens, mask, behaviour logprobs, versions, text, finished.

    temperature 0 is greedy. `stop` are strings; the tokenizer's end of sequence always stops.
    """

    model: str
    reads: tuple[str, ...] = ("prompt",)
    n: Count = 1
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: whole vocabulary
    stop: tuple[str, ...] = ()
    max_new_tokens: Count | None = None  # default: batch.max_new_tokens of the run
    when: Switch = True


class Inference(_Call, frozen=True, tag="inference"):
    """One forward pass of a role over `tokens`: logprobs and values per token, or a score per sample."""

    model: str
    output: Literal["logprobs", "values", "scores"]
    writes: tuple[str, ...]
    reads: tuple[str, ...] = ("tokens",)
    temperature: Positive = 1.0  # logits are divided by it
    when: Switch = True


class Function(_Call, frozen=True, tag="function"):
    """A plain function (rewards, filters, the user's own): a built-in name, or `module:function` of the run's folder.

    It runs in a worker's subprocess and gets each key it reads as a keyword of that name, and `args`; per sample by
    default. `on_error: score` gives a failing sample `error_value` instead of failing the run.
    """

    fn: str
    reads: tuple[str, ...] = ()
    writes: dict[str, str] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    over: Literal["sample", "group", "batch"] = "sample"
    timeout_seconds: Positive = 30.0
    on_error: Literal["fail", "score"] = "fail"
    error_value: float = 0.0
    when: Switch = True


class Advantage(_Call, frozen=True, tag="advantage"):
    """A pipeline of steps from the reward to `advantages` (and `returns` where a step makes them)."""

    steps: dict[str, Step | None]
    reads: tuple[str, ...] = ("reward",)
    writes: tuple[str, ...] = ("advantages",)
    when: Switch = True


class Train(_Call, frozen=True, tag="train"):
    """Optimizer steps of a role: the batch is cut into `minibatches`, one step each, `epochs` times over."""

    model: str
    loss: Loss
    lr: NonNegative = 1e-6
    optimizer: Optimizer = field(default_factory=Optimizer)
    minibatches: Count = 1
    epochs: Count = 1
    temperature: Positive = 1.0  # of the policy in the loss: the sampling temperature
    when: Switch = True


ModelCall = Generate | Inference | Function | Advantage | Train


class GraphSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A graph file: an algorithm. `inputs` are the data's columns with their key types."""

    name: str
    calls: dict[str, ModelCall]
    inputs: dict[str, str]
    models: dict[str, ModelRole] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    format: int = FORMAT
