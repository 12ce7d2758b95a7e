"""Before anything heavy starts: the first rows are tokenised and the functions tried on made-up answers. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import Graph
from realgraph.graphs.keys import BEHAVIOUR_LOGPROBS, FINISHED, MASK, TEXT, TOKENS, VERSIONS, Level
from realgraph.graphs.spec import Function
from realgraph.runtime.data import DataSet, Row, TooLong, tokenizer_source
from realgraph.runtime.function_host import FunctionError, FunctionHost
from realgraph.runtime.functions import Unit, UnitResult
from realgraph.runtime.job import Job
from realgraph.runtime.tokenize import Tokenizer, load_tokenizer

N_ROWS = 8
N_TRIED = 2  # rows that the functions are tried on
OTHER_ANSWERS = ("", "I do not know.")

Known = dict[str, tuple[Level, Any]]  # key -> its level; values of the samples, or the group's one value


def preflight(job: Job) -> list[str]:
    """Lines that tell what the first rows are like. Raises ConfigError naming the row, column or function at fault."""
    path, revision = tokenizer_source(job.graph)
    tokenizer = load_tokenizer(path, revision)
    inputs = {key.name: key.type for key in job.graph.inputs}
    data = DataSet(job.data, inputs, tokenizer, job.graph.samples_per_group)
    rows = [data.row(i) for i in range(min(N_ROWS, len(data)))]
    kept = [row for row in rows if isinstance(row, Row)]
    lines = _describe(job, data, rows, tokenizer)
    if not kept:
        lengths = ", ".join(str(row.n_tokens) for row in rows if isinstance(row, TooLong))
        text = f"the first {len(rows)} prompts are all too long: {lengths} tokens"
        raise ConfigError(
            [Problem(data.where(0), text, f"raise data.max_prompt_tokens = {job.data.max_prompt_tokens}")]
        )
    functions = {name: call for name, call in job.graph.calls.items() if isinstance(call, Function)}
    if functions:
        with FunctionHost(job.user_dir, job.runtime.function_processes) as host:
            lines += _try(job.graph, functions, data, kept[:N_TRIED], (host, tokenizer))
    return lines


def refuse_machine(job: Job, n_gpus: int) -> None:
    """Raises ConfigError for a plan that this machine can't run; `plan` and a dry run look at any cluster."""
    cluster = job.cluster
    if cluster.nodes > 1:
        text = f"the plan is for {cluster.nodes} hosts, and this version runs on one"
        hint = "set cluster.nodes to 1 to run here; `realgraph plan` plans for any number"
    elif not cluster.is_cpu and n_gpus < cluster.devices_per_node:
        text = f"the plan is for {cluster.devices_per_node} x {cluster.kind}, and this machine has {n_gpus} NVIDIA GPUs"
        hint = "set cluster: {kind: auto} to run on what this machine has"
    else:
        return
    raise ConfigError([Problem(Where(path="$.cluster"), text, hint, "cluster")])


def _describe(job: Job, data: DataSet, rows: Sequence[Row | TooLong], tokenizer: Tokenizer) -> list[str]:
    """Size and lengths of the data, and its first row as the model sees it."""
    kept = [row for row in rows if isinstance(row, Row)]
    lines = [f"data: {len(data):,} rows of {job.data.path}"]
    if len(kept) < len(rows):
        lines.append(f"  {len(rows) - len(kept)} of the first {len(rows)} prompts are too long and are left out")
    for name, key in ((key.name, key.type) for key in job.graph.inputs):
        if key.dtype == "tokens" and key.level == "group" and kept:
            lines.append(f"  {name}: {_lengths([len(row.group[name]) for row in kept])} tokens")
            lines.append(f"  first: {_short(tokenizer.decode(kept[0].group[name]))}")
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
    rows: Sequence[Row],
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
                lines += _try_row(graph, name, values, host, data.where(row.index))
        except (FunctionError, TimeoutError) as error:
            raise ConfigError([Problem(Where(path=f"$.calls.{name}.fn"), str(error), "", "function")]) from error
    return lines


def _made_up(graph: Graph, row: Row, tokenizer: Tokenizer) -> Known:
    """Values of a row's inputs and of a generate call's keys: its own answer, if it has one, and two others."""
    known: Known = {name: (graph.keys[name].type.level, value) for name, value in row.group.items()}
    if row.samples:
        for name in row.samples[0]:
            known[name] = (graph.keys[name].type.level, [sample[name] for sample in row.samples])
        return known
    answers = [value for value in row.group.values() if isinstance(value, str)]
    prompt: list[int] = next((v for v in row.group.values() if isinstance(v, list)), [])
    texts = [*answers[:1], *OTHER_ANSWERS]
    written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    known[TEXT] = ("sample", texts)
    known[TOKENS] = ("sample", [prompt + new for new in written])
    known[MASK] = ("token", [[False] * len(prompt) + [True] * len(new) for new in written])
    known[BEHAVIOUR_LOGPROBS] = ("token", [[0.0] * len(prompt) + [-1.0] * len(new) for new in written])
    known[VERSIONS] = ("token", [[0] * (len(prompt) + len(new)) for new in written])
    known[FINISHED] = ("sample", [True] * len(texts))
    return known


def _try_row(graph: Graph, name: str, known: Known, host: FunctionHost, where: Where) -> list[str]:
    """Run one call on a row's made-up group; what it writes is added to `known` for the calls after it."""
    call = graph.calls[name]
    assert isinstance(call, Function)
    n = len(known[TOKENS][1]) if TOKENS in known else 1
    units = _units(call, graph.reads[name], known, n)
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
        known[key] = (level, values if call.over == "sample" else _of_group(level, call, values[0]))
    return [f"{name}: {call.fn}: {_told(call, known, n, results)}"]


def _of_group(level: Level, call: Function, value: Any) -> Any:
    return value[0] if level == "group" and call.over == "batch" else value


def _units(call: Function, reads: Sequence[str], known: Known, n: int) -> list[Unit]:
    """One unit a sample, or one of the whole group."""

    def of(key: str, sample: int) -> Any:
        level, value = known[key]
        return value if level in ("group", "step") else value[sample]

    ids = tuple(range(n))
    tokens = known[TOKENS][1] if TOKENS in known else [[]] * n
    lengths = tuple(len(row) for row in tokens)
    if call.over == "sample":
        return [Unit((i,), {key: of(key, i) for key in reads}, (0,), (lengths[i],)) for i in ids]
    bare = ("group", "step") if call.over == "group" else ()
    kwargs = {key: of(key, 0) if known[key][0] in bare else [of(key, i) for i in ids] for key in reads}
    return [Unit(ids, kwargs, (0,) * n, lengths)]


def _told(call: Function, known: Known, n: int, results: Sequence[UnitResult]) -> str:
    """`reward 1 on '42', 0 on '', 0 on 'I do not know.'`"""
    texts = known[TEXT][1] if TEXT in known else [f"sample {i}" for i in range(n)]
    told = []
    for key in call.writes:
        level, value = known[key]
        if level == "sample":
            told.append(
                f"{key} " + ", ".join(f"{_number(v)} on {_short(t)}" for v, t in zip(value, texts, strict=True))
            )
        elif level in ("group", "step"):
            told.append(f"{key} {_number(value)}")
        else:
            told.append(f"{key} per token")
    n_failed = sum(bool(result.error) for result in results)
    return "; ".join(told) + (f"; {n_failed} failed and got error_value: {_first(results)}" if n_failed else "")


def _first(results: Sequence[UnitResult]) -> str:
    return next(result.error for result in results if result.error)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
