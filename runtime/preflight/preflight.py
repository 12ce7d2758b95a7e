"""Before anything heavy starts: the first rows are tokenised and the functions tried on made-up answers. No torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.functions import GATHERED
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import (
    BEHAVIOUR_LOGPROBS,
    FINISHED,
    MASK,
    TEXT,
    TOKENS,
    VERSIONS,
    Level,
    is_prompt,
    own_tokens,
)
from realgraph.graphs.spec import Advantage, Function, Generate, Inference
from realgraph.runtime.data.data import DataRow, DataSet, TooLong, model_source, tokenizer_source
from realgraph.runtime.data.own_tokens import open_own_tokens
from realgraph.runtime.data.stops import CONFIG, json_object, stops_of
from realgraph.runtime.data.tokenize import Tokenizer, load_tokenizer
from realgraph.runtime.functions.functions import Unit, UnitResult, keywords_of
from realgraph.runtime.functions.host import FunctionError, FunctionHost
from realgraph.runtime.job.job import Job
from realgraph.runtime.preflight.applied import try_applied
from realgraph.runtime.preflight.same_tokens import check_tokenizers
from realgraph.runtime.processes.open_files import allow_open_files

N_ROWS = 8
N_TRIED = 2  # rows that the functions are tried on
N_SHOWN = 3  # made-up samples whose values are shown
OTHER_ANSWERS = ("", "I do not know.")

Known = dict[str, tuple[Level, Any]]  # key -> its level; values of the samples, or the group's one value


def preflight(job: Job) -> list[str]:
    """Lines that tell what the first rows are like. Raises ConfigError naming what is at fault."""
    allow_open_files(job.cluster.n_devices)
    path, revision = tokenizer_source(job.graph)
    tokenizer = load_tokenizer(path, revision)
    inputs = {key.name: key.type for key in job.graph.inputs}
    data = DataSet(job.data, inputs, tokenizer, job.graph.samples_per_group, job.batch.max_new_tokens)
    rows = [data.row(i) for i in range(min(N_ROWS, len(data)))]
    kept = [row for row in rows if isinstance(row, DataRow)]
    lines = _describe(job, data, rows, tokenizer)
    if not kept:
        long = [row for row in rows if isinstance(row, TooLong)]
        text = f"the first {len(rows)} rows are all too long: {', '.join(str(row.n_tokens) for row in long)} tokens"
        if all(row.limit > job.data.max_prompt_tokens for row in long):  # whole sequences
            hint = f"raise batch.max_new_tokens = {job.batch.max_new_tokens}"
        else:
            hint = f"raise data.max_prompt_tokens = {job.data.max_prompt_tokens}"
        raise ConfigError([Problem(data.where(0), text, hint)])
    lines += check_tokens(job, data, kept, tokenizer)
    calls = job.graph.calls.items()
    functions = {name: call for name, call in calls if isinstance(call, Function) and call.fn != GATHERED}
    limit = job.runtime.function_max_processes
    with FunctionHost(job.user_dir, job.runtime.function_processes, max_processes=limit) as host:  # starts when asked
        lines += _try(job.graph, functions, data, kept[:N_TRIED], (host, tokenizer))
        lines += try_applied(job.graph, host, job.user_dir)
    return lines


def check_tokens(job: Job, data: DataSet, rows: Sequence[DataRow], tokenizer: Tokenizer) -> list[str]:
    """Lines on what ends samples, whether all roles share their tokens, and the first samples of those with a tokenizer
    of their own. Raises ConfigError."""
    texts = [value for row in rows for value in row.raw.values() if isinstance(value, str)]
    lines = check_tokenizers(job.graph, tokenizer, texts)
    _refuse_outside(job, rows)
    for name, call in job.graph.calls.items():
        if not isinstance(call, Generate):
            continue
        folder = Path(model_source(job.graph, call.model)[0]).expanduser()
        stops_of(name, call, job.data, tokenizer, folder if folder.is_dir() else None)
        for own in open_own_tokens(job.graph).values() if name == job.graph.generates[0] else ():
            tokens: Sequence[int] = ()
            for row in rows:
                asked = data.asked(row, call.reads[0])
                try:
                    tokens = own.tokens(asked.conversation, "So it goes.", finished=True, tools=asked.tools)
                except ValueError as error:
                    raise ConfigError([Problem(data.where(row.index), str(error), "", "tokenizer")]) from error
            lines.append(f"{own.role}: its own tokens: {_short(own.tokenizer.decode(tokens))}")
    return lines


def _refuse_outside(job: Job, rows: Sequence[DataRow]) -> None:
    """Raises ConfigError where a model at hand has no such token as the first rows hold."""
    prompts = [key.name for key in job.graph.inputs if is_prompt(key.type)]
    used = [row.group[name] for row in rows for name in prompts]
    used += [sample[TOKENS] for row in rows for sample in row.samples]
    most = max((max(tokens) for tokens in used if tokens), default=-1)
    for role in job.graph.models:
        if own_tokens(role) in job.graph.keys:
            continue
        folder = Path(model_source(job.graph, role)[0]).expanduser()
        config = folder / CONFIG
        vocabulary = json_object(config).get("vocab_size") if config.is_file() else None
        if isinstance(vocabulary, int) and most >= vocabulary:
            text = f"the data have the token {most}, and the vocabulary of {role!r} ends at {vocabulary - 1}"
            hint = "take the tokenizer that belongs to the model, or a model with an embedding of every token"
            raise ConfigError([Problem(Where(path=f"$.models.{role}.path"), text, hint, "tokenizer")])


def refuse_machine(job: Job, n_gpus: int) -> None:
    """Raises ConfigError for a plan that this machine can't run; `plan` and a dry run look at any cluster."""
    cluster = job.cluster
    if cluster.nodes > 1:
        text = f"the plan is for {cluster.nodes} hosts, and launch.kind local starts all workers on this one"
        hint = "set launch: {kind: hosts, listen: HOST:PORT}, or cluster.nodes to 1; `realgraph plan` takes any number"
    elif not cluster.is_cpu and n_gpus < cluster.devices_per_node:
        text = f"the plan is for {cluster.devices_per_node} x {cluster.kind}, and this machine has {n_gpus} NVIDIA GPUs"
        hint = "set cluster: {kind: auto} to run on what this machine has"
    else:
        return
    raise ConfigError([Problem(Where(path="$.cluster"), text, hint, "cluster")])


def _describe(job: Job, data: DataSet, rows: Sequence[DataRow | TooLong], tokenizer: Tokenizer) -> list[str]:
    """Size and lengths of the data, and its first row as the model sees it."""
    kept = [row for row in rows if isinstance(row, DataRow)]
    lines = [f"data: {len(data):,} rows of {job.data.path}"]
    if len(kept) < len(rows):
        lines.append(f"  {len(rows) - len(kept)} of the first {len(rows)} rows are too long and are left out")
    for name, key in ((key.name, key.type) for key in job.graph.inputs):
        if key.dtype == "tokens" and key.level == "group" and kept:
            lines.append(f"  {name}: {_lengths([len(row.group[name]) for row in kept])} tokens")
            lines.append(f"  first: {_short(tokenizer.decode(kept[0].group[name]))}")
            if token := next(filter(None, (data.special_in(row, name) for row in kept)), ""):
                wrapped = f"  {name}: texts hold {token!r}, and become a user's turn in the chat template all the same"
                lines.append(f"{wrapped}: if they are rendered already, set data.chat: false")
    if kept and kept[0].samples:
        samples = [sample for row in kept for sample in row.samples]
        trained = [sum(sample[MASK]) for sample in samples]
        lines.append(f"  samples: {_lengths([len(s[TOKENS]) for s in samples])} tokens, {_lengths(trained)} trained on")
        first = kept[0].samples[0]
        learnt = [token for token, use in zip(first[TOKENS], first[MASK], strict=True) if use]
        lines.append(f"  first: {_short(tokenizer.decode(first[TOKENS]))}")
        lines.append(f"  trained on: {_short(tokenizer.decode(learnt))}")
    return lines


def _lengths(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low} to {high} (mean {sum(lengths) / len(lengths):.0f})"


def _short(text: object) -> str:
    shown = repr(str(text))
    return shown if len(shown) <= 240 else f"{shown[:150]} ... {shown[-80:]}"


def _try(
    graph: Graph,
    functions: Mapping[str, Function],
    data: DataSet,
    rows: Sequence[DataRow],
    tools: tuple[FunctionHost, Tokenizer],
) -> list[str]:
    """Import every function; run those whose inputs can be made up on a group of made-up samples of each row."""
    host, tokenizer = tools
    lines = []
    known = [_made_up(graph, row, tokenizer) for row in rows]
    for name, call in functions.items():
        try:
            host.check(name, call)
            missing = [key for key in graph.reads[name] if key not in known[0]]
            if missing:
                lines.append(f"{name}: {call.fn} is there; not tried, for it reads {', '.join(missing)}")
                continue
            for row, values in zip(rows, known, strict=True):
                lines += _try_row(graph, name, values, tools, data.where(row.index))
        except (FunctionError, TimeoutError) as error:
            raise ConfigError([Problem(Where(path=f"$.calls.{name}.fn"), str(error), "", "function")]) from error
    return lines


def _made_up(graph: Graph, row: DataRow, tokenizer: Tokenizer) -> Known:
    """Values of a row's inputs and of a generate call's keys: its own answer, if it has one, and two others."""
    known: Known = {name: (graph.keys[name].type.level, value) for name, value in row.group.items()}
    if row.samples:
        for name in row.samples[0]:
            known[name] = (graph.keys[name].type.level, [sample[name] for sample in row.samples])
        return known | _made_numbers(graph, [len(sample[TOKENS]) for sample in row.samples])
    made = _made_generated(row, tokenizer, graph.samples_per_group)
    for name in graph.generates if graph.leading else ():
        known |= _of_call(graph, name, made)
    known |= made  # of several calls too: what is shown of samples
    return known | _made_numbers(graph, [len(tokens) for tokens in known[TOKENS][1]])


def _of_call(graph: Graph, name: str, made: Known) -> Known:
    """The keys of one of several generate calls; one value of each where it makes one sample for a whole group."""
    full = {f"{name}.{key}": value for key, (_, value) in made.items()}
    levels: dict[str, Level] = {key: graph.keys[key].type.level for key in full if key in graph.keys}
    return {key: (level, full[key][0] if level == "group" else full[key]) for key, level in levels.items()}


def _made_generated(row: DataRow, tokenizer: Tokenizer, samples_per_group: int) -> Known:
    """The keys of a generate call: the row's own answer and two others as samples, again and again for large groups."""
    known: Known = {}
    answers = [value for value in row.group.values() if isinstance(value, str)]
    prompt: list[int] = next((v for v in row.group.values() if isinstance(v, list)), [])
    texts = [*answers[:1], *OTHER_ANSWERS]
    texts += [texts[i % len(texts)] for i in range(len(texts), samples_per_group)]
    written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    known[TEXT] = ("sample", texts)
    known[TOKENS] = ("sample", [prompt + new for new in written])
    known[MASK] = ("token", [[False] * len(prompt) + [True] * len(new) for new in written])
    known[BEHAVIOUR_LOGPROBS] = ("token", [[0.0] * len(prompt) + [-1.0] * len(new) for new in written])
    known[VERSIONS] = ("token", [[0] * (len(prompt) + len(new)) for new in written])
    known[FINISHED] = ("sample", [True] * len(texts))
    return known


def _made_numbers(graph: Graph, lengths: Sequence[int]) -> Known:
    """Numbers for what inference and advantage calls write: nobody has run them yet."""
    known: Known = {}
    for name, key in graph.keys.items():
        if isinstance(graph.calls.get(key.producer), Inference | Advantage):
            number = -1.0 if key.type.logprobs is not None else 0.5
            values = [number if key.type.level == "sample" else [number] * length for length in lengths]
            known[name] = (key.type.level, values)
    return known


def _try_row(graph: Graph, name: str, known: Known, tools: tuple[FunctionHost, Tokenizer], where: Where) -> list[str]:
    """Run one call on a row's made-up group; what it writes is added to `known` for the calls after it."""
    call = graph.calls[name]
    assert isinstance(call, Function)
    n_known = len(known[TOKENS][1]) if TOKENS in known else 1
    n = n_known if call.over == "sample" else min(n_known, graph.samples_per_group)  # a group is as large as in the run
    host, tokenizer = tools
    units = _units(graph, name, known, n, tokenizer)
    results = host.run(name, call, units)
    failed = next((result for result in results if result.error), None)
    if failed is not None and call.on_error == "fail":
        texts = known[TEXT][1] if TEXT in known else []
        shown = f" (text: {_short(texts[failed.sample])})" if texts and failed.sample >= 0 else ""
        hint = "on_error: score gives a failing sample error_value instead of failing the run"
        raise ConfigError([Problem(where, f"{failed.error}{shown}", hint, "function")])
    for key in call.writes:
        level = graph.keys[key].type.level if key in graph.keys else "sample"
        values = [result.values.get(key) for result in results]
        written = values if call.over == "sample" else _of_group(level, call, values[0])
        repeated = level in ("sample", "token") and isinstance(written, list) and written
        known[key] = (level, [written[i % len(written)] for i in range(n_known)] if repeated else written)
    return [f"{name}: {call.fn}: {_values_text(call, known, min(n, N_SHOWN), results)}"]


def _of_group(level: Level, call: Function, value: Any) -> Any:
    return value[0] if level == "group" and call.over == "batch" else value


def _units(graph: Graph, name: str, known: Known, n: int, tokenizer: Tokenizer) -> list[Unit]:
    """One unit a sample, or one of the whole group."""
    call, reads = graph.calls[name], graph.reads[name]
    assert isinstance(call, Function)
    prompts = [key for key in reads if key in graph.keys and is_prompt(graph.keys[key].type)]

    def keywords(given: dict[str, Any]) -> dict[str, Any]:
        return keywords_of(call, given, prompts, partial(tokenizer.decode, skip_special_tokens=True))

    def of(key: str, sample: int) -> Any:
        level, value = known[key]
        return value if level == "group" else value[sample]

    ids = tuple(range(n))
    tokens = known[TOKENS][1] if TOKENS in known else [[]] * n
    lengths = tuple(len(row) for row in tokens)
    if call.over == "sample":
        return [Unit((i,), keywords({key: of(key, i) for key in reads}), (0,), (lengths[i],)) for i in ids]
    bare = ("group",) if call.over == "group" else ()
    given = {key: of(key, 0) if known[key][0] in bare else [of(key, i) for i in ids] for key in reads}
    return [Unit(ids, keywords(given), (0,) * n, lengths)]


def _values_text(call: Function, known: Known, n: int, results: Sequence[UnitResult]) -> str:
    """`reward 1 on '42', 0 on '', 0 on 'I do not know.'`"""
    texts = known[TEXT][1][:n] if TEXT in known else [f"sample {i}" for i in range(n)]
    lines = []
    for key in call.writes:
        level, value = known[key]
        if level == "sample":
            lines.append(
                f"{key} " + ", ".join(f"{_number(v)} on {_short(t)}" for v, t in zip(value[:n], texts, strict=True))
            )
        elif level == "group":
            lines.append(f"{key} {_number(value)}")
        else:
            lines.append(f"{key} per token")
    n_failed = sum(bool(result.error) for result in results)
    return "; ".join(lines) + (f"; {n_failed} failed and got error_value: {_first(results)}" if n_failed else "")


def _first(results: Sequence[UnitResult]) -> str:
    return next(result.error for result in results if result.error)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else _short(value) if isinstance(value, str) else repr(value)
