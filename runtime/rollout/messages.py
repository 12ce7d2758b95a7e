"""SGLang's HTTP interface as structs, of 0.5.18 to 0.5.23: the requests as they are sent, and of the answers the fields
that are read. Field names are SGLang's own. What an answer holds besides is ignored; what is read is of these types."""

import re
from typing import Literal

from msgspec import Struct

PauseMode = Literal["abort", "retract", "in_place"]


class SamplingParams(Struct, frozen=True):
    """`sampling_params`. temperature 0 is greedy; top_k -1 and top_p 1 keep the whole vocabulary.

    Every field is always sent, or the defaults of the model's generation config would stand in.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] | None = None  # texts; None: no text ends the answer
    stop_token_ids: tuple[int, ...] | None = None  # beside the model's own; without effect under ignore_eos
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = False
    no_stop_trim: bool = True


class GenerateRequest(Struct, frozen=True):
    """One sequence for /generate. rid: `new_rid()`, for aborts go by prefix."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int | None = None  # larger is sooner, on a server with --enable-priority-scheduling
    return_logprob: bool = True
    stream: bool = False


class FinishReason(Struct, frozen=True):
    """The reason for which a sequence ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None  # the stop token, or text
    message: str | None = None  # of an abort
    status_code: int | None = None  # of an abort by the server itself; an answer without stream has it as its status


class GivenSpan(Struct, frozen=True):
    """Tokens start..end-1 were drawn under weights of this version."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, frozen=True):
    """Facts about an answer. Aborts lack the counts; the spans are there since 0.5.20."""

    id: str
    finish_reason: FinishReason | None = None  # None: of a stream that goes on
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    num_retractions: int | None = None
    weight_version: str | None = None
    weight_versions: tuple[GivenSpan, ...] | None = None
    output_token_logprobs: tuple[tuple[float, int, str | None], ...] | None = None


class GenerateAnswer(Struct, frozen=True):
    """An answer of /generate, or one event of its stream."""

    output_ids: tuple[int, ...]
    meta_info: MetaInfo


class StreamFault(Struct, frozen=True):
    """The error of a stream, whose HTTP status is 200 all the same."""

    message: str
    code: int | None = None  # the status that an answer without stream would have had


class StreamEvent(Struct, frozen=True):
    """One event of a stream: tokens, or an error."""

    output_ids: tuple[int, ...] | None = None
    meta_info: MetaInfo | None = None
    error: StreamFault | None = None


class Updated(Struct, frozen=True):
    """The answer to a call about weights."""

    success: bool
    message: str = ""


class Paused(Struct, frozen=True):
    """The answer to /pause_generation and /continue_generation."""

    status: Literal["ok"]


class ServedModel(Struct, frozen=True):
    """/model_info: answered at once, also while the server is paused."""

    model_path: str
    weight_version: str
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None


class ServerArguments(Struct, frozen=True):
    """/server_info: the server's arguments, and its version. Its `weight_version` is that of the start."""

    version: str
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    max_req_input_len: int | None = None
    max_running_requests: int | None = None
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False

    @property
    def streams(self) -> bool:
        """Its streams have new tokens alone, and end as they should. Without its tokenizer it breaks off those of
        waiting requests that are aborted: a KeyError, as their ends have texts and the parts before have none."""
        return self.incremental_streaming_output and not self.skip_tokenizer_init

    @property
    def flushes_paused(self) -> bool:
        """It can forget its cache while paused requests wait. Releases before 0.5.21 end where they are told to."""
        release = re.match(r"(\d+)\.(\d+)\.(\d+)", self.version)
        return release is None or tuple(map(int, release.groups())) >= (0, 5, 21)


class RankChecksums(Struct, frozen=True):
    """One tensor-parallel rank's: the name of each tensor as the server has it -> its checksum."""

    checksums: dict[str, str]


class ServerChecksums(Struct, frozen=True):
    """/weights_checker."""

    ranks: tuple[RankChecksums, ...]
    success: bool = True
    message: str | None = None


class BroadcastGroup(Struct, frozen=True):
    """/init_weights_update_group: rank 0 is the trainer, which hosts the store; the server's begin at rank_offset."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"]


class BroadcastBucket(Struct, frozen=True):
    """/update_weights_from_distributed: tensors by their Hugging Face names, in the order in which they are sent.

    Under "flattened_bucket" they travel as one tensor of bytes, one behind the other.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "bfloat16", without "torch."
    shapes: tuple[tuple[int, ...], ...]
    group_name: str
    load_format: Literal["flattened_bucket"] | None = "flattened_bucket"


class RankLoad(Struct, frozen=True):
    """The load of one data-parallel replica, as of a moment ago."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # of the cache
    max_total_num_tokens: int


class Loads(Struct, frozen=True):
    """/v1/loads."""

    loads: tuple[RankLoad, ...]


class Timeouts(Struct, frozen=True):
    """Deadlines of calls, in seconds; a run sets its own (`opening/engines.py`)."""

    connect_seconds: float = 10.0
    control_seconds: float = 60.0  # pause, resume, abort, flush, and all questions
    update_seconds: float = 600.0  # joining a group, one bucket, or all weights from disk
    answer_seconds: float = 3600.0  # a whole answer of /generate, or the next event of its stream
