"""A user's mistakes: the text, the place and the fix of each. Knows no YAML and no graph."""

import difflib
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

MOST_CHANGED = 0.4  # of a word's characters: what a slip of the pen may change
MOST_CHARACTERS = 300  # of another library's message


class Where(Struct, frozen=True, order=True):
    """A place in the user's input: a file, a line (from 1; 0 if unknown) and a YAML path such as `$.calls.train.lr`."""

    file: str = ""
    line: int = 0
    path: str = "$"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.path}"


class Problem(Struct, frozen=True, order=True):
    """One mistake. `text` says what is wrong and what was expected; `hint` how to fix it; `rule` names the check."""

    where: Where
    text: str
    hint: str = ""
    rule: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.text}"
        return f"{head}\n  hint: {self.hint}" if self.hint else head


class ConfigError(Exception):
    """All the problems found in one input. The command line prints them and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def reason(error: OSError | UnicodeDecodeError) -> str:
    """The reason why a file can't be read as text, in words."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text: byte {error.start}"
    return (error.strerror or str(error)).lower()


def in_words(error: Exception) -> str:
    """A library's message about a file that it can't read, on one line."""
    text = re.sub(r"\b\w+Error: ", "", " ".join(str(error).split()))
    return (text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " ...") or type(error).__name__


OTHER_WORDS = {
    "lr": "learning_rate actor_learning_rate",
    "kl_coef": "beta init_kl_coef kl_loss_coef kl_ctl reference_policy_kl_penalty",
    "group_size": "n num_generations num_generations_per_prompt n_samples n_samples_per_prompt rollout_n",
    "epochs": "num_iterations ppo_epochs",
    "minibatches": "num_mini_batches ppo_n_minibatches",
    "clip_low": "epsilon clip_ratio clip_range eps_clip clip_ratio_low ratio_clip_min",
    "clip_high": "epsilon clip_ratio clip_range eps_clip epsilon_high clip_ratio_high eps_clip_high ratio_clip_max",
    "groups": "size batch_size train_batch_size rollout_batch_size num_prompts_per_step",
    "max_new_tokens": "max_tokens max_completion_length max_response_length generate_max_len rollout_max_response_len",
    "max_prompt_tokens": "max_prompt_length prompt_max_len rollout_max_prompt_len",
    "max_tokens_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu max_token_len_per_gpu",
    "staleness": "max_async_level async_level max_head_offpolicyness max_off_policyness",
    "nodes": "nnodes num_nodes",
    "devices": "gpus n_gpus num_gpus gpus_per_node n_gpus_per_node num_gpus_per_node",
    "path": "model_path model_name_or_path pretrain hf_checkpoint dataset train_files prompt_data",
    "steps": "epochs max_steps max_num_steps total_training_steps num_train_epochs total_epochs num_rollout",
    "data": "dataset",
    "outputs": "output_dir ckpt_path save_path default_local_dir",
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "float32": "fp32 float",
    "tp": "tp_size tensor_parallel_size tensor_model_parallel_size",
    "pp": "pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "cp": "cp_size context_parallel_size",
    "ep": "ep_size expert_parallel_size expert_model_parallel_size",
    "dp": "dp_size data_parallel_size",
}  # names here -> those of TRL, verl, OpenRLHF, NeMo-RL, slime, AReaL and prime-rl


def suggest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known spelling, or lists what is known when nothing is close.

    A word that others begin with (`H100` of `H100-SXM`, `train` of `train_actor`) stands for those, and a word of other
    tools (`learning_rate`) for ours.
    """
    choices: Sequence[str] = sorted(set(known))
    if meant := [choice for choice in choices if word.lower().replace("-", "_") in OTHER_WORDS.get(choice, "").split()]:
        return f"did you mean {' and '.join(map(repr, meant))}?"
    longer = [choice for choice in choices if choice.lower().startswith(word.lower())] if len(word) > 2 else []
    if 0 < len(longer) <= 4:
        return f"did you mean {' or '.join(map(repr, longer))}?"
    close = [choice for choice in difflib.get_close_matches(word, choices, n=5, cutoff=0.6) if _is_slip(word, choice)]
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(choices)}" if 0 < len(choices) <= 24 else ""


def _is_slip(word: str, choice: str) -> bool:
    """True where a choice may be what a person meant to write. A long common beginning alone is not enough."""
    one, two = word.lower(), choice.lower()
    changes = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")
    return changed <= max(2, MOST_CHANGED * max(len(one), len(two)))
