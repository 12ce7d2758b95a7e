"""The graph language: what a graph file may say. Typed and immutable; knows neither files nor rules."""

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, field

from realgraph.graphs.entries import Fraction, NonNegative, Positive
from realgraph.graphs.keys import DATA
from realgraph.graphs.maths import Loss
from realgraph.graphs.steps import Step

FORMAT = 1  # version of the graph and run file format

MOST_SAMPLES = 10_000  # of a group

Count = Annotated[int, Meta(ge=1)]
Limit = TypeVar("Limit", bound=int | None)  # of a batch, which a check of the graph alone may not know
Switch = bool | int | float | str | None  # `when`: an interpolated value; false, 0, '' and null switch off


class ModelRole(Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """One role of a model. `path` is a Hugging Face directory or Hub id; `init` takes another role's path."""

    trainable: bool = False  # has an optimizer
    path: str | None = None  # folder, relative to the run file, or Hub id
    revision: str | None = None  # branch, tag or commit of a Hub id
    init: str | None = None  # role whose weights it starts from
    head: Literal["lm", "value", "score"] = "lm"  # vocabulary, or one number a token or sample
    when: Switch = True  # falsy: the role and its calls are out
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"  # of weights and activations
    master_dtype: Literal["float32", "float64"] | None = (
        None  # of the optimizer's copy; default float32, float64 in float64
    )
    gradient_checkpointing: bool = False  # less memory, one more forward pass
    routing_replay: bool = False  # of a mixture of experts: train with the experts that generation chose
    ema_rate: Fraction | None = None  # a moving average of the role under `init`: share of it taken per step


class Optimizer(Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW (arXiv:1711.05101) and its schedule. It belongs to the role: train calls of one role must agree on it."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)  # decay of the moments
    eps: Positive = 1e-8  # added to the second moment's root
    weight_decay: NonNegative = 0.0  # decoupled
    max_grad_norm: Positive | None = 1.0  # null: no clipping
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate, after warm-up
    warmup_steps: Annotated[int, Meta(ge=0)] = 0  # optimizer steps; one that nothing has a part in counts too
    final_lr_fraction: Fraction = 0.0  # of lr, what the schedule falls to right after the last step


class _Call(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A model or function call. Edges follow from its keys. `when` switches the call off where it is falsy."""


class Generate(_Call, frozen=True, tag="generate"):
    """Sample `n` responses of a role to each prompt; writes tokens, mask, behaviour logprobs, versions, text, finished.

    Where several calls of a graph generate, the keys of each go by its name: `rollout.text`, `judge.text`. The prompt
    is one of the data or, of a later call, a key that another call wrote: tokens, or a text that becomes a prompt as
    those of the data do. temperature 0 is greedy. The model's and the tokenizer's ends of sequence always stop, and in
    chats the template's end of a turn.
    """

    model: str  # role
    reads: tuple[str, ...] = ("prompt",)  # the prompt's key
    n: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1  # samples a prompt
    temperature: NonNegative = 1.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1: whole vocabulary
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: whole vocabulary
    stop: tuple[str, ...] = ()  # texts that end a sample, or special tokens
    max_new_tokens: Count | None = None  # default: batch.max_new_tokens of the run
    max_prompt_tokens: Count | None = (
        None  # of a written prompt; default: data.max_prompt_tokens + batch.max_new_tokens
    )
    when: Switch = True  # falsy: the call is out

    def most_new_tokens(self, of_batch: Limit) -> int | Limit:
        """The longest response: the call's own limit, else the batch's."""
        return self.max_new_tokens or of_batch


class Inference(_Call, frozen=True, tag="inference"):
    """One forward pass of a role over `tokens`: logprobs and values per token, or a score per sample.

    The tokens are those of the role that generates. `tokenizer: own`, for scores only, is for a role of another family:
    the prompt's conversation and the sample's text are rendered by its own chat template and cut by its own tokenizer.
    """

    model: str  # role
    output: Literal["logprobs", "values", "scores"]  # what the role's head gives
    writes: tuple[str, ...]  # the key for it
    reads: tuple[str, ...] = ("tokens",)  # what is read of the batch
    samples: str | None = None  # the generate call that made them; default: as the calls that read its output
    temperature: Positive = 1.0  # logits are divided by it
    tokenizer: Literal["shared", "own"] = "shared"  # of the tokens that it reads
    when: Switch = True  # falsy: the call is out


class Function(_Call, frozen=True, tag="function"):
    """A plain function (rewards, filters, the user's own): a built-in name, or `module:function` of the run's folder.

    It runs in a worker's subprocess and gets each key it reads as a keyword of that name, and `args`; per sample by
    default. As a mapping, `reads` gives each keyword its key: `{text: judge.text}`. A prompt reaches it as text; those
    that `ids` names as token ids too, as keywords such as `prompt_ids`. `on_error: score` gives a failing sample
    `error_value` instead of failing the run. One that writes `keep: group bool` leaves groups out, `keep: sample bool`
    samples: their group goes on with the others where these are `min_samples` or more, and else is left out, too. Of
    the environment it gets what programs need to run, such as PATH and HOME, and the variables that `env` names.
    """

    fn: str  # built-in name or module:function
    reads: tuple[str, ...] | dict[str, str] = ()  # keys passed as keywords, or keyword -> key
    writes: dict[str, str] = field(default_factory=dict)  # key -> its type, such as `sample float32`
    args: dict[str, Any] = field(default_factory=dict)  # further keywords, as they are
    ids: tuple[str, ...] = ()  # prompts of `reads` that it gets as token ids too, under their names with `_ids`
    over: Literal["sample", "group", "batch"] = "sample"  # what one execution gets
    timeout_seconds: Positive = 30.0  # of one execution
    on_error: Literal["fail", "score"] = "fail"  # what an exception does
    error_value: float = 0.0  # with `on_error: score`
    min_samples: Count | None = None  # that `keep` has to leave of a group; default: 2 if it compares them, else 1
    env: tuple[str, ...] = ()  # environment variables that its process gets, by name: keys of services and the like
    when: Switch = True  # falsy: the call is out

    @property
    def keywords(self) -> dict[str, str]:
        """Keyword -> the key whose value it brings."""
        return dict(self.reads) if isinstance(self.reads, dict) else {key: key for key in self.reads}


class Advantage(_Call, frozen=True, tag="advantage"):
    """A pipeline of steps from the reward to `advantages` (and `returns` where a step makes them)."""

    steps: dict[str, Step | None]  # run from top to bottom
    reads: tuple[str, ...] = ("reward",)  # the first is the reward
    writes: tuple[str, ...] = ("advantages",)  # the first gets the advantages
    samples: str | None = None  # the generate call that made them; default: as the calls that read its output
    when: Switch = True  # falsy: the call is out


class Train(_Call, frozen=True, tag="train"):
    """Optimizer steps of a role: the batch is cut into `minibatches`, one step each, `epochs` times over."""

    model: str  # role, trainable
    loss: Loss  # terms and aggregation
    # the generate call that made them; default: the one of its role. `data`: each row's own sequence, beside samples
    samples: str | None = None
    lr: NonNegative = 1e-6  # peak learning rate
    optimizer: Optimizer = field(default_factory=Optimizer)  # its settings
    minibatches: Count = 1  # optimizer steps per epoch
    epochs: Count = 1  # passes over the batch
    temperature: Positive = 1.0  # of the policy in the loss: the sampling temperature
    when: Switch = True  # falsy: the call is out


ModelCall = Generate | Inference | Function | Advantage | Train


def role_of(call: ModelCall) -> str:
    """The role that a call runs, '' for functions and advantages."""
    match call:
        case Generate(model=model) | Inference(model=model) | Train(model=model):
            return model
        case Function() | Advantage():
            return ""


class GraphSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A graph file: an algorithm. `inputs` are the data's columns with their key types."""

    name: str  # of the algorithm
    calls: dict[str, ModelCall]  # call -> what it does
    inputs: dict[str, str]  # key of the data -> its type, such as `group text`
    models: dict[str, ModelRole] = field(default_factory=dict)  # role -> model
    params: dict[str, Any] = field(default_factory=dict)  # name -> default: what a run file may set under `params`
    description: str = ""  # one line, for `realgraph graphs`
    format: int = FORMAT  # version of this file's format


# --- several generate calls -------------------------------------------------------------------------------------------


def generate_calls(spec: GraphSpec) -> dict[str, Generate]:
    """The generate calls, in the file's order."""
    return {name: call for name, call in spec.calls.items() if isinstance(call, Generate)}


def generated_key(spec: GraphSpec, call: str, key: str) -> str:
    """The name of a key that the generate call `call` writes: plain where it is the only one."""
    return key if len(generate_calls(spec)) < 2 else f"{call}.{key}"


def works_on_data(spec: GraphSpec, call: ModelCall) -> bool:
    """True where `call` trains on sequences of the data while other calls generate."""
    generates = generate_calls(spec)
    return isinstance(call, Train) and call.samples == DATA and bool(generates) and DATA not in generates


def leading_call(spec: GraphSpec) -> str:
    """The generate call that makes the samples of a group, '' where nothing generates.

    It answers prompts of the data; of several such calls, it is the one whose samples are trained on, or has the most.
    """
    calls = generate_calls(spec)
    of_data = [name for name, call in calls.items() if spec.inputs.keys() & call.reads] or list(calls)
    trained = [name for name in of_data if name in _trained_on(spec)]
    return max(trained or of_data, key=lambda name: calls[name].n, default="")


def samples_of_role(call: ModelCall, generate: Generate) -> bool:
    """True where `call` trains the role that `generate` samples, and does not say on whose samples."""
    return isinstance(call, Train) and call.samples is None and call.model == generate.model


def _trained_on(spec: GraphSpec) -> set[str]:
    trains = [call for call in spec.calls.values() if isinstance(call, Train)]
    own = {n for n, call in generate_calls(spec).items() if any(samples_of_role(train, call) for train in trains)}
    return own | {train.samples for train in trains if train.samples is not None}


def generated_level(spec: GraphSpec, name: str, passed: tuple[str, ...] = ()) -> Literal["group", "sample"]:
    """`sample` where a generate call makes one sample beside each of the leading call's, `group` where one a group."""
    calls, leading = generate_calls(spec), leading_call(spec)
    prompt = "".join(calls[name].reads[:1])
    writer = prompt.partition(".")[0]
    if name == leading or name in passed:
        return "sample"
    if writer in calls and writer != prompt:
        of_samples = generated_level(spec, writer, (*passed, name)) == "sample"
    else:
        functions = [call for call in spec.calls.values() if isinstance(call, Function)]
        types = [call.writes[prompt] for call in functions if prompt in call.writes]
        of_samples = bool(types) and types[0].split()[:1] != ["group"]
    n = calls[name].n
    beside = n == calls[leading].n and (n > 1 or name in _trained_on(spec))
    return "sample" if of_samples or beside else "group"
