"""`realgraph generate`: a trained model's answers to some prompts, in this process."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from realgraph.commands.eval import RunOfModel, answering_roles, model_folder, read_run
from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.spec import ModelRole
from realgraph.graphs.yaml.document import COMMAND_LINE, parse_override
from realgraph.runtime.job.job import DataSpec
from realgraph.runtime.job.run_folder import RunFolder
from realgraph.screen.output import say


class SamplingRequest(NamedTuple):
    """Sampling, and the form of the prompts."""

    temperature: float = 0.0  # 0: greedy
    max_new_tokens: int = 256
    n: int = 1  # samples of each prompt
    seed: int = 0
    chat: bool = True  # wrap prompts in the model's chat template, if it has one
    template_args: Sequence[str] = ()  # `name=value` texts, over those of the run that the model comes from


def generate_command(model: Path, prompts: Sequence[str], ask: SamplingRequest) -> None:
    """Print each prompt with its samples. Raises ConfigError where no model lies at `model`, and for prompts that it
    can't answer."""
    folder = model_folder(model)
    others = [] if folder == model.expanduser().absolute() else answering_roles(folder.parent)[1:]
    if others:
        others_at = " and ".join(str(folder.parent / role) for role in others)
        say(f"{folder.name} answers; of the same run: {others_at}", err=True)
    for prompt, text in answers(folder, prompts, ask):
        say(f"{prompt}{text}" if len(prompts) * ask.n == 1 else f"{prompt!r} -> {text!r}")


def answers(folder: Path, prompts: Sequence[str], ask: SamplingRequest) -> list[tuple[str, str]]:
    """(prompt, text) for every sample, in the order of the prompts. Raises ConfigError."""
    import torch

    from realgraph.runtime.data.conversations import Conversations
    from realgraph.runtime.data.stops import asked_stops, end_tokens
    from realgraph.runtime.data.tokenize import load_tokenizer, prompt_tokens
    from realgraph.runtime.engine import Request
    from realgraph.runtime.generate.continuous_batch import ContinuousBatch
    from realgraph.runtime.job.sample_ids import sample_seed
    from realgraph.runtime.models.building import Start, build
    from realgraph.runtime.worker.resources import pick_device

    _refuse_prompts((i, _unreadable(prompt)) for i, prompt in enumerate(prompts))
    tokenizer = load_tokenizer(str(folder))
    chats = Conversations(chat_settings(folder, ask, bool(tokenizer.chat_template)), tokenizer)
    try:
        cut = [tuple(prompt_tokens(chats.of_prompt(prompt), tokenizer, chats.template)) for prompt in prompts]
    except ValueError as error:  # a template that refuses, for whatever reason of its own
        raise ConfigError([Problem(Where(str(folder)), str(error), "--no-chat gives prompts as they are")]) from error
    device = pick_device(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    network = build(ModelRole(), str(folder), Start(device, dtype)).network
    positions, vocabulary = int(network.config.max_position_embeddings), int(network.config.vocab_size)
    _refuse_prompts((i, _unanswerable(tokens, positions, vocabulary)) for i, tokens in enumerate(cut))
    engine = ContinuousBatch(network, decode=partial(tokenizer.decode, skip_special_tokens=True))
    asked = asked_stops(stops_in(run_of(folder), folder.name), tokenizer, Where(str(folder)))
    stops = asked.tokens | end_tokens(tokenizer, folder, chats.template if chats.on else None)
    requests = [
        Request(
            id=index,
            prompt=cut[index // ask.n],
            max_new_tokens=min(ask.max_new_tokens, positions - len(cut[index // ask.n])),
            seed=sample_seed(ask.seed, index),
            temperature=ask.temperature,
            stop_tokens=stops,
            stop_strings=asked.strings,
        )
        for index in range(len(prompts) * ask.n)
    ]
    engine.submit(requests)
    texts: dict[int, str] = {}
    while not engine.idle:
        for done in engine.step():
            texts[done.id] = tokenizer.decode(done.tokens, skip_special_tokens=True)
    return [(prompts[index // ask.n], text) for index, text in sorted(texts.items())]


def run_of(folder: Path) -> RunOfModel:
    """The run that a model is a checkpoint of; one that says nothing where it is none. Raises ConfigError."""
    roots = [parent.parent for parent in folder.parents if parent.name == "checkpoints"]
    job = next((job for root in roots if (job := RunFolder(root).job).is_file()), None)
    return read_run(job) if job is not None else RunOfModel()


def stops_in(run: RunOfModel, role: str) -> tuple[str, ...]:
    """The texts that ended the samples of a role's first generate call."""
    return next((call.stop for call in run.graph.generates if call.model == role), ())


def chat_settings(folder: Path, ask: SamplingRequest, has_template: bool) -> DataSpec:
    """The rendering of prompts: as in the run that the model is a checkpoint of, if it is one, but for what was asked
    otherwise. Raises ConfigError."""
    had = run_of(folder).data
    args = {**had.template_args, **_named(ask.template_args)}
    chat = ask.chat and has_template and had.chat is not False
    if not chat:
        _refuse_args(ask, has_template)
        return DataSpec(str(folder), chat=False)
    return DataSpec(str(folder), system=had.system, template_args=args, tools=had.tools)


def _named(texts: Sequence[str]) -> Mapping[str, Any]:
    """`enable_thinking=false` -> its name and YAML value. Raises ConfigError."""
    arguments: dict[str, Any] = {}
    for text in texts:
        arguments |= parse_override(text).tree
    return arguments


def _refuse_args(ask: SamplingRequest, has_template: bool) -> None:
    if ask.template_args:
        why = "the prompts are plain text" if has_template else "the model has no chat template"
        text = f"--template-arg is given, but {why}"
        raise ConfigError([Problem(Where(COMMAND_LINE), text, "leave one of the two out")])


def _unreadable(prompt: str) -> str:
    """The reason why a prompt is no text to answer; '' where it is one."""
    if not prompt:
        return "it is empty, and a model needs some text to continue"
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        return f"it is not UTF-8 text: byte {len(prompt[: error.start].encode()) + 1}"
    return ""


def _unanswerable(tokens: Sequence[int], positions: int, vocabulary: int) -> str:
    """The reason why a model of so many positions and tokens can't continue a prompt; '' where it can."""
    if not tokens:
        return "the tokenizer makes no tokens of it"
    if len(tokens) >= positions:
        return f"it has {len(tokens)} tokens, and the model has {positions} positions for prompt and answer"
    if max(tokens) >= vocabulary:
        return f"it has the token {max(tokens)}, and the model's vocabulary ends at {vocabulary - 1}"
    return ""


def _refuse_prompts(reasons: Any) -> None:
    problems = [
        Problem(Where(COMMAND_LINE), f"prompt {i + 1} can't be answered: {reason}", "", "prompt")
        for i, reason in reasons
        if reason
    ]
    if problems:
        raise ConfigError(problems)
