"""A small graph text, what the loader says about a changed one, and random YAML values."""

from hypothesis import strategies as st

from realgraph.graphs.errors import ConfigError, Problem
from realgraph.graphs.spec import GraphSpec
from realgraph.graphs.yaml.document import Document, parse_document, parse_override
from realgraph.graphs.yaml.load import load_graph_document, user_document

GRAPH = """\
name: tiny
params: {lr: 1e-5, n: 4, clip: 0.2, path: null}
inputs: {prompt: group tokens, answer: group text}
models:
  actor: {trainable: true, path: "${params.path}"}
calls:
  rollout:
    kind: generate
    model: actor
    n: ${params.n}
  reward:
    kind: function
    fn: exact_match
    reads: [text, answer]
    writes: {reward: sample float32}
    args: {strict: null}
  advantage:
    kind: advantage
    steps:
      center: {by: group}
      scale: {}
  train:
    kind: train
    model: actor
    lr: ${params.lr}
    optimizer:
      weight_decay: 0.1
    loss:
      aggregate:
        kind: token_mean
      terms:
        policy:
          kind: policy_gradient
          clip:
            kind: two_sided
            low: ${params.clip}
            dual: 3.0
"""


def problems_of(text: str, *overrides: str) -> list[Problem]:
    """Problems that the loader finds in a graph text."""
    try:
        spec_of(text, *overrides)
    except ConfigError as error:
        return list(error.problems)
    return []


def spec_of(text: str, *overrides: str) -> GraphSpec:
    user = user_document(Document({}), [parse_override(override) for override in overrides])
    return load_graph_document(parse_document(text, "tiny.yaml"), user, {})[0]


def line_of(text: str, part: str) -> int:
    return 1 + next(i for i, line in enumerate(text.splitlines()) if part in line)


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # what no YAML text may hold
WHOLE = st.integers(1 - 2**63, 2**63 - 1)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text(TEXT)
KEYS = st.text(TEXT, min_size=1, max_size=6)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
MAPPINGS = st.dictionaries(KEYS, TREES, max_size=4)
