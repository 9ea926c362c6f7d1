"""The messages between an HTTP process and the engine process, in msgpack over two ZeroMQ ipc sockets.

Commands go to the engine: Submit, Abort, ResetPrefixCache, Pause, Resume, UpdateWeights, ChangePhase, Stop. A change of
the weights, the LoRA adapters or the models has two phases (`Phase`). Events come from the engine. While it starts
these are Report, and then Ready or Failed. Later they are Outputs (one message per step, for all requests in it),
WeightVersion before the first tokens of other weights, Adapters after each change of them, and Stats at intervals,
which are also the heartbeat. Each Question has a number, and the Reply with the same number answers it.

With several HTTP processes, each of them is an *API server*. An API server has a number that is never used again, and a
socket for the outputs of its own requests. AddApiServer names both, and Ready answers it on that socket. The process
that started the engine is API server 0. Request ids are unique over all processes, because each has a random part.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from batcher.change import PauseMode as PauseMode
from batcher.request import ErrorCode, FinishReason, Request, RequestOutput, SamplingParams, Targets, TokenLogprobs
from batcher.stats import EngineStats

if TYPE_CHECKING:  # the HTTP process does without numpy
    from batcher import delivery


class WireRequest(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a `batcher.request.Request`."""

    request_id: str
    prompt: bytes  # i32[n]: a long list of numbers would keep the engine's process busy for milliseconds
    sampling: SamplingParams
    priority: int = 0
    cache_salt: int = 0
    deadline_s: float | None = None
    embeds: bool = False
    counts_drafts: bool = False
    client: int = 0
    group: str = ""
    adapter: int = 0
    model: int = 0
    targets: Targets | None = None
    is_flex: bool = False


SAME_GRAMMAR = ""


class Submit(msgspec.Struct, tag=True, omit_defaults=True):
    """Submits all requests of one HTTP request, in order. An empty prompt stands for the previous request's prompt, and
    SAME_GRAMMAR for the previous request's grammar. So choices of one prompt send both only once."""

    requests: list[WireRequest]
    api_server: int = 0


class Abort(msgspec.Struct, tag=True):
    """Ends requests. The engine counts them under `reason`: `stop` if a stop string was found in the text."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Empties the prefix cache."""

    reset_external: bool  # also those in the host's memory and in files


class Question(msgspec.Struct, kw_only=True):
    """A command that is answered by a Reply with the same number."""

    number: int = 0


WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)  # the parts of an engine's device memory, by vLLM's names


class WeightsChange(enum.Enum):
    """The kinds of changes of the weights of a running engine."""

    SLEEP = "sleep"  # all parts leave the device
    WAKE_UP = "wake up"  # parts come back
    RELOAD = "reload"  # other weights of the same shapes are loaded
    UPDATE = "update"  # the weights of `UpdateWeights` are checked and loaded


class ChangeWeights(msgspec.Struct, tag=True):
    """Changes the weights between two steps."""

    change: WeightsChange
    model: str | None = None  # for RELOAD: the folder or file to load; None: the one of the start
    level: int = 1  # for SLEEP: at 1 the weights are kept in the host's memory, at 2 they are dropped
    parts: tuple[str, ...] | None = None  # for WAKE_UP: some of PARTS; None: all, and none may have been dropped
    version: str = ""  # for UPDATE: the name of the new weights; "": the number of updates since the start


class Pause(Question, tag=True):
    """Holds all requests until Resume. The reply comes when no request runs any more."""

    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = True  # whether the prefix cache is emptied


class Resume(Question, tag=True):
    """Lets requests run again."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array from a trainer, with its Hugging Face name."""

    name: str
    dtype: str  # a name in NumPy or ml_dtypes, such as "bfloat16"
    shape: tuple[int, ...]


class InFolder(msgspec.Struct, tag=True, frozen=True):
    """All weights, in a folder or a bucket."""

    path: str


class InSharedMemory(msgspec.Struct, tag=True, frozen=True):
    """Arrays in a block of this machine's shared memory, one after the other, each aligned to 64 bytes."""

    block: str
    arrays: tuple[Array, ...]


WeightsSource = InFolder | InSharedMemory


class UpdateStep(enum.Enum):
    """The steps of an update of the weights, before the change UPDATE. The old weights serve."""

    BEGIN = "begin"
    RECEIVE = "receive"  # reads arrays from one source; may be repeated
    ABANDON = "abandon"  # forgets the arrays that have been received; there may be no update


class UpdateWeights(Question, tag=True):
    """Does one step of an update of the weights."""

    step: UpdateStep
    source: WeightsSource | None = None  # for RECEIVE


class IfLoaded(enum.Enum):
    """What LoadAdapter and LoadModel do if there is an adapter or a model of this name already."""

    REFUSE = "refuse"
    KEEP = "keep"
    REPLACE = "replace"  # loads the folder's current weights, which later requests use


class LoadAdapter(msgspec.Struct, tag=True):
    """Loads a LoRA adapter and gives it a name."""

    name: str
    path: str
    base_model: str | None = None  # a loaded model that it changes, or another name that clients see; None: --model
    if_loaded: IfLoaded = IfLoaded.REFUSE


class UnloadAdapter(msgspec.Struct, tag=True):
    """Removes an adapter's name. Running requests keep its weights."""

    name: str


class LoadModel(msgspec.Struct, tag=True):
    """Adds a model, and gives it a name."""

    name: str
    path: str  # a checkpoint, or a LoRA adapter, which is merged into the engine's own model
    if_loaded: IfLoaded = IfLoaded.REFUSE


class UnloadModel(msgspec.Struct, tag=True):
    """Removes a model's name. Running requests keep its weights."""

    name: str


AdapterChange = LoadAdapter | UnloadAdapter
ModelChange = LoadModel | UnloadModel
NamedChange = AdapterChange | ModelChange
Change = ChangeWeights | NamedChange
HOLD_S = 1800.0  # longer than reading weights takes; a group of engines decides earlier


class Phase(enum.Enum):
    """The phases of a change. All engines of a group are prepared before one commits."""

    PREPARE = "prepare"  # checks the change and does its work, as far as it can be undone; an error ends the change
    COMMIT = "commit"
    ABANDON = "abandon"  # undoes PREPARE


class ChangePhase(Question, tag=True):
    """One phase of a change. No step runs between the phases of a change of the weights."""

    phase: Phase
    change: Change
    hold_s: float = HOLD_S  # for PREPARE: how long steps wait for the next phase; then the engine abandons the change


class AddApiServer(msgspec.Struct, tag=True):
    """Adds an API server. The outputs of its requests go to this address."""

    api_server: int
    address: str


class RemoveApiServer(msgspec.Struct, tag=True):
    """Removes an API server whose process has ended, and aborts its requests. Its number is never used again."""

    api_server: int


class Stop(msgspec.Struct, tag=True):
    """Aborts all requests and ends the engine's process."""


class Logprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A `batcher.request.TokenLogprobs` with its numbers packed, because a request may ask for millions of them."""

    logprob: float
    top_ids: bytes  # i32[num_top]
    top_logprobs: bytes  # f64[num_top]
    rank: int | None = None

    @classmethod
    def packed(
        cls, logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float], rank: int | None = None
    ) -> Logprobs:
        """Packs the log-probabilities of one token."""
        return cls(logprob, array("i", top_ids).tobytes(), array("d", top_logprobs).tobytes(), rank)

    def top(self, most: int) -> list[tuple[int, float]]:
        """(token id, log-probability) of at most `most` tokens, most likely first."""
        ids, values = array("i", self.top_ids), array("d", self.top_logprobs)
        return list(zip(ids[:most], values[:most], strict=True))


class Output(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a `batcher.request.RequestOutput`. `status` is the HTTP status of an `error`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs] | None = None
    error: str | None = None
    status: int = 500
    param: str | None = None
    expired: bool = False  # whether the error is that the request has waited too long
    embedding: bytes | None = None
    times: tuple[float, float] | None = None
    number: int = -1
    drafts: tuple[int, int] | None = None
    by_pause: bool = False
    sampled_logprobs: tuple[float, ...] = ()
    retry_after_s: int | None = None  # of status 429


class Tokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The columns of a `batcher.delivery.Tokens`, as bytes."""

    numbers: bytes  # i64[n]
    token_ids: bytes  # i32[m]
    counts: bytes | None = None  # i32[n]

    def rows(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields (number, token ids) for each request."""
        numbers, ids = array("q", self.numbers), array("i", self.token_ids)
        if self.counts is None:
            yield from zip(numbers, zip(ids, strict=True), strict=True)
            return
        start = 0
        for number, count in zip(numbers, array("i", self.counts), strict=True):
            yield number, ids[start : start + count]
            start += count


class AttentionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's attention backend, and the results of the self-tests at its start."""

    requested: str = ""  # the value of the flag
    backend: str = ""
    self_test: str = ""  # "passed", "passed (kept)", or why none was run
    failures: dict[str, str] = {}  # backends that cannot be used, or failed their self-test -> the reason


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's properties that the server needs before the first request."""

    max_model_len: int  # tokens of prompt and output of one request
    vocab_size: int  # ids at or above it cannot be sent
    eos_token_ids: tuple[int, ...] = ()  # the tokens that end an answer
    logprobs_mode: str = "raw_logprobs"  # a `batcher.request.LogprobsMode`
    embedding_size: int | None = None  # numbers of an embedding; None: the engine makes none
    attention: AttentionInfo = AttentionInfo()
    cache_config: dict[str, str] = {}  # labels of the cache_config_info metric: page size, pages, dtype
    max_loras: int = 0  # LoRA adapters that run at once; 0: there can be none
    adapter_bytes: int = 0  # bytes of one adapter slot on a device
    max_models: int = 0  # models whose weights may be on the device at once; 0: there is one model only
    page_size: int = 0  # tokens


class Report(msgspec.Struct, tag=True):
    """A line about the engine's start."""

    line: str


class Ready(msgspec.Struct, tag=True):
    """The engine takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or has died. `message` may be shown to clients."""

    message: str
    is_refusal: bool = False  # whether the reason is a setting, a path or a checkpoint that cannot be used


class Ended(msgspec.Struct, tag=True):
    """The engine of a follower has ended normally, because the leader of its hosts was told to stop."""


class Outputs(msgspec.Struct, tag=True):
    """The outputs and tokens of a step. The outputs are read before the tokens."""

    outputs: list[Output]
    tokens: Tokens | None = None


DEFAULT_VERSION = "default"  # the version of the weights of the start


class WeightVersion(msgspec.Struct, tag=True):
    """The version of the weights of all later tokens. It goes to all API servers."""

    version: str


class Adapter(msgspec.Struct, tag=True, frozen=True):
    """A LoRA adapter with its name."""

    name: str
    identity: int  # the identity of its weights
    path: str
    base_model: str | None = None
    model: int = 0  # the identity of the model that it changes; 0: the engine's own


class LoadedModel(msgspec.Struct, tag=True, frozen=True):
    """A model with its name, besides the one that the engine started with."""

    name: str
    identity: int  # the identity of its weights
    path: str
    max_model_len: int  # tokens of prompt and output of one request
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # the tokens that end an answer
    embedding_size: int | None = None  # numbers of an embedding; None: the engine makes none
    folder: str = ""  # of its tokenizer, chat template and generation_config.json; "": those of the engine's own model
    max_loras: int = 0  # LoRA adapters of it that may run at once
    load: int = 0  # differs if the name is loaded again


class Adapters(msgspec.Struct, tag=True):
    """All loaded adapters and models. It goes to all API servers after each change."""

    adapters: list[Adapter]
    num_changes: int  # of adapters and models
    num_loads: int  # of adapters
    models: list[LoadedModel] = []


class Reply(msgspec.Struct, tag=True, kw_only=True):
    """The reply to a Question. `error` says why nothing has changed."""

    number: int = 0  # the number of the question
    error: str | None = None
    status: int = 400  # the HTTP status of an error
    loaded: Adapter | LoadedModel | None = None  # the adapter or model to be loaded or unloaded
    missing: list[str] | None = None  # the PARTS that are not on the device from now on; None: as before


class Stats(msgspec.Struct, tag=True):
    """The engine's statistics, sent at intervals."""

    stats: EngineStats


EngineQuestion = Pause | Resume | UpdateWeights | ChangePhase
AnyQuestion = EngineQuestion | Change  # a whole change has two phases
Command = Submit | Abort | ResetPrefixCache | EngineQuestion | AddApiServer | RemoveApiServer | Stop
Event = Report | Ready | Failed | Ended | Outputs | WeightVersion | Adapters | Reply | Stats


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of i32[n]."""
    return array("i", token_ids).tobytes()


def packed_prompts(prompts: Sequence[Sequence[int]]) -> list[bytes]:
    """Packs each prompt. The work grows with the number of tokens, so long lists are packed in a thread."""
    return list(map(packed, prompts))


def num_packed(token_ids: bytes) -> int:
    """The number of token ids in the bytes of `packed`."""
    return len(token_ids) // array("i").itemsize


def unpacked(token_ids: bytes) -> array[int]:
    """The token ids in the bytes of `packed`, i32[n]."""
    return array("i", token_ids)


def requests_from_wire(items: Sequence[WireRequest]) -> list[Request]:
    """The requests of one Submit. Requests with the same prompt share its array."""
    requests: list[Request] = []
    for item in items:
        prompt = unpacked(item.prompt) if item.prompt else requests[-1].prompt
        sampling = item.sampling
        if sampling.grammar == SAME_GRAMMAR:
            sampling = replace(sampling, grammar=requests[-1].sampling.grammar)
        fields = msgspec.structs.asdict(item) | {"prompt": prompt, "sampling": sampling}
        requests.append(Request(**fields))
    return requests


_STATUSES: dict[ErrorCode | None, int] = {
    ErrorCode.QUEUE_DEADLINE: 503,
    ErrorCode.LATE: 429,
    ErrorCode.ENGINE_DEAD: 503,
    ErrorCode.MODEL: 503,
    ErrorCode.GRAMMAR: 400,
    ErrorCode.ADAPTER: 404,
}  # of an error


def output_to_wire(output: RequestOutput) -> Output:
    """The message for an output, with its log-probabilities packed."""
    return Output(
        output.request_id,
        list(output.token_ids),
        output.finish_reason.value if output.finish_reason else None,
        output.stop_reason,
        output.num_cached_tokens,
        [_logprobs(entry) for entry in output.logprobs] if output.logprobs else None,
        None if output.prompt_logprobs is None else [_logprobs(entry) for entry in output.prompt_logprobs],
        output.error,
        _STATUSES.get(output.error_code, 500),
        expired=output.error_code is ErrorCode.QUEUE_DEADLINE,
        embedding=output.embedding,
        times=output.times,
        number=output.number,
        drafts=output.drafts,
        by_pause=output.by_pause,
        sampled_logprobs=output.sampled_logprobs,
        retry_after_s=output.retry_after_s,
    )


def tokens_to_wire(tokens: delivery.Tokens) -> Tokens:
    """The message for columns of tokens."""
    counts = None if tokens.counts is None else tokens.counts.tobytes()
    return Tokens(tokens.numbers.tobytes(), tokens.token_ids.tobytes(), counts)


def failure(request_id: str, error: str, *, status: int, param: str | None = None) -> Output:
    """The last output of a request that the engine has refused or will not finish."""
    reason = FinishReason.ERROR.value
    return Output(request_id, [], finish_reason=reason, error=error, status=status, param=param)


def _logprobs(entry: TokenLogprobs) -> Logprobs:
    return Logprobs.packed(entry.logprob, entry.top_ids, entry.top_logprobs, entry.rank)
