"""A check that the roles of a graph mean the same by a token, before any weights are loaded. No torch.

Ids are all that engines exchange: a role with another vocabulary would read other words, and say nothing.
"""

import random
from collections.abc import Iterator, Sequence

from realgraph.graphs.errors import ConfigError, Problem, Where
from realgraph.graphs.graph import Graph
from realgraph.graphs.infer import is_own
from realgraph.graphs.spec import Advantage, Function, Inference
from realgraph.runtime.data.data import model_source, tokenizer_source
from realgraph.runtime.data.tokenize import Tokenizer, load_tokenizer, special_tokens

PROBES = (
    "The quick brown fox doesn't jump over 12,345.67 lazy dogs: why?\n\n  - it's 3 a.m.\t(UTC+2)",
    "def f(x_1: int = 0x1F) -> dict[str, list]:\n    return {'a': [x_1 ** 2 != 3, \"é\"]}  # ok\r\n",
    "\\frac{a+b}{2} \\le \\sqrt{ab} \u2260 \u03c0 \u2248 3.14159\u2026",
    "Größe, naïve façade, Łódź; Привет, мир! 你好，世界。こんにちは 안녕하세요 مرحبا नमस्ते 👩‍🚀🏳️‍🌈",
)
N_RANDOM_TEXTS, RANDOM_TEXT_TOKENS = 64, 24  # texts of random tokens, and tokens of each


def check_tokenizers(graph: Graph, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Lines about roles whose tokenizer is not there to be compared. texts: of the data, to be cut by all alike.

    Raises ConfigError for every role that reads tokens of another tokenizer than its own.
    """
    shared = tokenizer_source(graph)
    problems, lines = [], []
    differences: dict[tuple[str, str | None], str | None] = {shared: ""}
    for name, role in _readers(graph):
        source = model_source(graph, role)
        if source not in differences:
            differences[source] = _difference_from(source, tokenizer, texts)
            if differences[source] is None:
                lines.append(f"{role}: no tokenizer lies with {source[0]}: it must be that of {shared[0]}")
        difference = differences[source]
        if difference:
            text = f"{role!r} ({source[0]}) has another tokenizer than that of its tokens ({shared[0]}): {difference}"
            problems.append(Problem(Where(path=f"$.calls.{name}.model"), text, _hint(graph, name), "tokenizer"))
    if problems:
        raise ConfigError(problems)
    return lines


def _readers(graph: Graph) -> Iterator[tuple[str, str]]:
    """Calls that run a role on the shared tokens, with the role."""
    for name, call in graph.calls.items():
        if not isinstance(call, Function | Advantage) and not is_own(call):
            yield name, call.model


def _hint(graph: Graph, name: str) -> str:
    call = graph.calls[name]
    if isinstance(call, Inference) and call.output == "scores":
        return f"write `tokenizer: own` in calls.{name}: it then reads the sample's text in its own tokens"
    return "take a model of the same family: what belongs to other tokens can't be laid beside those that were sampled"


def _difference_from(source: tuple[str, str | None], tokenizer: Tokenizer, texts: Sequence[str]) -> str | None:
    """The way a role's tokenizer differs, None where it has none."""
    try:
        other = load_tokenizer(*source)
    except ConfigError:  # weights alone: a critic or reward model may be saved without
        return None
    return difference(tokenizer, other, texts)


def difference(one: Tokenizer, other: Tokenizer, texts: Sequence[str] = ()) -> str:
    """The way `other` reads or cuts texts otherwise than `one`; '' where every token of `one` is the same token of
    `other` and both cut special tokens, PROBES, `texts` and random texts alike. A token that only pads is left out."""
    mine, theirs = one.get_vocab(), other.get_vocab()
    ends = {one.special_tokens_map.get(name) for name in ("bos_token", "eos_token")}
    pad = one.special_tokens_map.get("pad_token")
    wrong = {token: i for token, i in mine.items() if theirs.get(token) != i and (token != pad or pad in ends)}
    if wrong:
        token, index = min(wrong.items(), key=lambda item: item[1])
        at = {i: name for name, i in theirs.items()}.get(index)
        there = "none" if at is None else repr(at)
        return f"{len(wrong):,} of {len(mine):,} tokens differ; token {index} is {token!r} here and {there} there"
    special = "".join(token for token in special_tokens(one) if token != pad or pad in ends)
    for text in (special, *PROBES, *texts, *_random_texts(one)):
        cuts = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (one, other)]
        if cuts[0] != cuts[1]:
            first = next(
                (i for i, pair in enumerate(zip(*cuts, strict=False)) if pair[0] != pair[1]), min(map(len, cuts))
            )
            near = str(one.decode(cuts[0][max(0, first - 2) : first + 3]))
            return f"the tokens are the same, but texts are cut otherwise, as at {near!r}"
    return ""


def _random_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that reach all over the vocabulary, the same each time."""
    ids = sorted(tokenizer.get_vocab().values())
    rng = random.Random(0)
    for _ in range(N_RANDOM_TEXTS if ids else 0):
        yield str(tokenizer.decode(rng.choices(ids, k=RANDOM_TEXT_TOKENS), skip_special_tokens=True))
