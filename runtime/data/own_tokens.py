"""Samples for a role with a tokenizer of its own: the same conversation, in its template and its tokens. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from realgraph.graphs.graph import Graph
from realgraph.graphs.infer import is_own
from realgraph.graphs.keys import own_tokens
from realgraph.runtime.data.conversations import Conversation, template_names
from realgraph.runtime.data.data import model_source
from realgraph.runtime.data.tokenize import Template, Tokenizer, load_tokenizer, render

Tools = Sequence[Mapping[str, Any]] | None


class OwnTokens:
    """Cuts samples for one role. Its chat template renders the whole conversation, as at `apply_chat_template`; without
    a template plain prompts are continued, and an answer that ended by itself gets the tokenizer's end of sequence."""

    def __init__(self, role: str, tokenizer: Tokenizer) -> None:
        self.role, self.tokenizer = role, tokenizer
        self._takes_tools = "tools" in template_names(tokenizer)

    def tokens(self, prompt: Conversation, response: str, *, finished: bool, tools: Tools = None) -> list[int]:
        """Token ids of a prompt with its response. Raises ValueError where this tokenizer has no form for it."""
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            template = Template(tools=tools if self._takes_tools else None)
            whole = [*messages, {"role": "assistant", "content": response}]
            tokens = self.tokenizer.encode(
                render(whole, self.tokenizer, template, generation=False), add_special_tokens=False
            )
        elif not isinstance(prompt, str):
            raise ValueError(f"the prompt is a chat, and the tokenizer of {self.role!r} has no chat template")
        else:
            end = self.tokenizer.eos_token_id if finished else None
            tokens = self.tokenizer.encode(prompt + response, add_special_tokens=True)
            tokens += [end] if isinstance(end, int) and tokens[-1:] != [end] else []
        if not tokens:
            raise ValueError(f"the tokenizer of {self.role!r} makes no tokens of the sample")
        return tokens


def open_own_tokens(graph: Graph) -> dict[str, OwnTokens]:
    """Key of the graph -> what makes it. Raises ConfigError for a tokenizer that can't be loaded."""
    roles = dict.fromkeys(call.model for call in graph.calls.values() if is_own(call))
    return {own_tokens(role): OwnTokens(role, load_tokenizer(*model_source(graph, role))) for role in roles}
