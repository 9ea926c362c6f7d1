"""The settings of the HTTP server. They are built once, at the start, and do not read the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from batcher.request import MOST_TARGET_MS, Targets
from batcher.sampling_table import PARAMETERS
from model.inputs.json_file import read_fields
from model.inputs.limits import MAX_VOCAB_SIZE
from model.inputs.schema import TRUTH, integer, number, number_above
from server.flag import MOST_SECONDS, Once, check_flags, setting

DEFAULT_METRICS_PREFIX = "pallas_serve:"
DEFAULT_MAX_REQUEST_LOGPROBS = 4 * 2**20
DEFAULT_BATCH_CONCURRENCY = 64
MOST_API_SERVERS = 64
MOST_BATCH_REQUESTS = 4096  # in the engine at once
TOP_K_OFF = -1  # in requests and files; for the engine 0 is off
FLEX = "flex"  # the service tier of requests without targets
RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})  # of chat templates
_KEY_TARGETS = "--api-key-targets"


def _range_of(name: str) -> msgspec.Meta:
    """The range of a sampling parameter."""
    interval = PARAMETERS[name].range
    assert interval is not None
    return (number_above if interval.low_open else number)(interval.low, interval.high)


class _GenerationFile(msgspec.Struct):
    """The sampling fields of `generation_config.json`, with the ranges of a request's fields. A default outside its
    range would make every request fail.

    `transformers.GenerationConfig` reads `"temperature": "hot"` and `"top_p": 7` without an error.
    """

    do_sample: TRUTH | None = None
    temperature: Annotated[float, _range_of("temperature")] | None = None
    top_p: Annotated[float, _range_of("top_p")] | None = None
    top_k: Annotated[int, integer(TOP_K_OFF, 2**31 - 1)] | None = None
    min_p: Annotated[float, _range_of("min_p")] | None = None
    repetition_penalty: Annotated[float, _range_of("repetition_penalty")] | None = None
    max_new_tokens: Annotated[int, integer(1, 2**31 - 1)] | None = None

    def given(self) -> dict[str, Any]:
        """The given fields of `GenerationDefaults`; `do_sample: false` means greedy."""
        fields = msgspec.structs.asdict(self)
        greedy = {"temperature": 0.0} if fields.pop("do_sample") is False else {}
        return {name: value for name, value in fields.items() if value is not None} | greedy


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The values of fields that a request leaves out: those of `generation_config.json`, or OpenAI's values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # the most that any request gets, and not a default, as in vLLM

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationDefaults:
        """Reads the fields above from the file; `do_sample: false` means greedy. Without a file, the defaults remain.

        Raises ValueError, with the file's name and all wrong fields, for values that a request may not have.
        """
        path = folder / "generation_config.json"
        if not path.exists():
            return cls()
        return cls(**read_fields(path, _GenerationFile).given())

    def overridden(self, text: str, *, where: str) -> GenerationDefaults:
        """A copy with the values of a JSON object. Raises ValueError for a value that a request may not have. The
        message begins with `where`."""
        try:
            names = msgspec.json.decode(text, type=dict[str, Any]).keys()
            file = msgspec.json.decode(text, type=_GenerationFile)
        except msgspec.DecodeError as error:
            raise ValueError(f"{where} {text!r}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        known = file.__struct_fields__
        if unknown := sorted(names - set(known)):
            raise ValueError(f"{where}: unknown fields {', '.join(unknown)}; there are {', '.join(known)}")
        return replace(self, **file.given())


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRules:
    """How the flags change the defaults of every model."""

    replacement: GenerationDefaults | None = None  # in place of a model's own; None: each has its own
    changes: str | None = None  # --override-generation-config
    most_tokens: int | None = None  # --max-output-tokens

    def defaults_of(self, folder: Path | None) -> GenerationDefaults:
        """The defaults of the model in this folder; None: it has no files. Raises ValueError for values that a request
        may not have."""
        found = self.replacement
        if found is None:
            found = GenerationDefaults() if folder is None else GenerationDefaults.from_folder(folder)
        if self.changes is not None:
            found = found.overridden(self.changes, where="--override-generation-config")
        limits = [limit for limit in (found.max_new_tokens, self.most_tokens) if limit is not None]
        return replace(found, max_new_tokens=min(limits, default=None))


_GROUPS = {
    "server": "The address, the processes and the log.",
    "access": "API keys and origins.",
    "requests": "Defaults and limits of requests.",
    "connections": "What a client may take, for the server's own sake.",
}
_of_server, _of_access, _of_requests, _of_connections = (partial(setting, group=group) for group in _GROUPS)
_of_tls = partial(setting, group="tls")
_seconds = partial(_of_connections, metavar="S", above=0, most=MOST_SECONDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """The TLS files, in PEM form, and the options for clients' certificates. The flags have uvicorn's and vLLM's names.

    `certfile` also has the certificates of the authorities between the server's and the root.
    """

    GROUPS: ClassVar = {"tls": "HTTPS in place of HTTP."}

    certfile: Path = _of_tls(  # noqa: RUF009
        None, "The server's certificate; with it, HTTPS is served", name="--ssl-certfile", metavar="FILE",
    )  # fmt: skip
    keyfile: Path | None = _of_tls(  # noqa: RUF009
        None, "The certificate's key", unset="in --ssl-certfile", name="--ssl-keyfile", metavar="FILE",
    )  # fmt: skip
    keyfile_password: str | None = _of_tls(
        None, "The password of an encrypted --ssl-keyfile", name="--ssl-keyfile-password", action=Once, metavar="TEXT",
    )  # fmt: skip
    ca_certs: Path | None = _of_tls(  # noqa: RUF009
        None, "The authorities that sign clients' certificates", name="--ssl-ca-certs", metavar="FILE",
    )  # fmt: skip
    cert_reqs: int = _of_tls(
        0, "A client's certificate is not asked for (0), checked if there is one (1) or required (2)",
        name="--ssl-cert-reqs", choices=(0, 1, 2),
    )  # fmt: skip
    ciphers: str | None = _of_tls(
        None, "The ciphers of TLS 1.2, in OpenSSL's notation", unset="Python's", name="--ssl-ciphers", metavar="NAMES",
    )  # fmt: skip
    refresh: bool = _of_tls(False, "These files are loaded again when they change", name="--enable-ssl-refresh")

    def __post_init__(self) -> None:
        check_flags(self)
        if self.cert_reqs and self.ca_certs is None:
            raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs, the authorities that sign clients' certificates")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of the HTTP server. Fields with a flag are `setting`s. The command computes the other fields."""

    GROUPS: ClassVar = _GROUPS

    tokenizer_folder: Path
    vocab_size: int = MAX_VOCAB_SIZE  # the model's; only a tokenizer's special tokens may have ids beyond it
    model_names: tuple[str, ...]  # answers have the first; requests may have any of them
    model_root: str = ""  # the source of the weights, for /v1/models
    version: str = "0.0.0"
    tls: TlsFiles | None = None  # None: plain HTTP
    api_keys: tuple[str, ...] = ()  # none: open to all
    tool_call_parser: str | None = None  # None: as the template shows
    reasoning_parser: str | None = None  # None: as the template or a system message shows
    chat_template: str | None = None  # replaces the tokenizer's own
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # where a request does not set them
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    generation_rules: GenerationRules = field(default_factory=GenerationRules)  # for further models
    planner: tuple[str, ...] = ()  # the command that answers the page's plans; empty: there is no planner
    lora_folder: Path | None = None  # adapters in it are loaded when a request names them; None: there is no folder
    models_folder: Path | None = None  # as well, with models
    batch_concurrency: int = DEFAULT_BATCH_CONCURRENCY  # requests of all batches that are in the engine at once
    is_follower: bool = False  # whether it serves /health and /live only, until the leader of its hosts ends it
    debug: bool = False  # whether the engine's process prints the traceback of its failure
    show_cached_tokens: bool = True  # usage.prompt_tokens_details
    max_body_bytes: int = 8 * 2**20  # enough for a million token ids; a longer JSON would delay all streams
    max_embedding_inputs: int = 2048  # inputs of one HTTP request
    max_choices: int = 128  # sequences of one HTTP request: prompts times n
    template_timeout_s: float = 10.0  # for the chat template of one conversation
    heartbeat_timeout_s: float = 60.0  # an engine silent for longer is reported as unhealthy
    death_linger_s: float = 3.0  # after the engine's death /health answers 503 for this time, then the server exits

    host: str = _of_server("127.0.0.1", "The address to listen on")
    port: int = _of_server(8000, "The port; 0: any free one", least=0, most=65535)
    api_server_count: int = _of_server(
        1, "HTTP processes that share the address and the engines", least=1, most=MOST_API_SERVERS, also=("-asc",),
    )  # fmt: skip
    uds: Path | None = _of_server(None, "A Unix socket in place of host and port", metavar="PATH")  # noqa: RUF009
    root_path: str = _of_server(
        "", "The path under which a proxy serves this server, for /openapi.json", metavar="PATH",
    )  # fmt: skip
    ui: bool = _of_server(True, "There is no page at /")
    disable_fastapi_docs: bool = _of_server(False, "There are no /docs and no /openapi.json")
    grace_period_s: float = _of_server(
        30.0, "Seconds that running requests have to finish after SIGTERM; 0: they are ended at once", metavar="S",
        least=0, most=MOST_SECONDS, name="--shutdown-timeout",
    )  # fmt: skip
    metrics_prefix: str = _of_server(
        DEFAULT_METRICS_PREFIX, "The prefix of the metrics' names; `vllm:` keeps existing dashboards", metavar="P",
    )  # fmt: skip
    log_format: str = _of_server(
        "text", "The form of the log's lines. `json` also has a line for each request", choices=("text", "json"),
    )  # fmt: skip
    otlp_traces_endpoint: str | None = _of_server(
        None, "The collector that gets an OpenTelemetry span of each request. It needs the extra `otel`", metavar="URL",
    )  # fmt: skip
    enable_tokenizer_info_endpoint: bool = _of_server(False, "The server answers /tokenizer_info")

    batch_folder: Path | None = _of_server(  # noqa: RUF009
        None, "The server answers /v1/files and /v1/batches, and keeps files, batches, responses and conversations in "
        "this folder, which other users must not be able to enter", metavar="DIR",
    )  # fmt: skip
    batch_folder_gib: float = _of_server(
        4.0, "The most that the files of --batch-folder take", metavar="GIB", least=2**-20, most=2**20,
        name="--batch-folder-size",
    )  # fmt: skip

    admin_api_keys: Sequence[str] = _of_access(
        (), "The keys of the administrators' routes", unset="these routes are closed", nargs="+", metavar="KEY",
        name="--admin-api-key",
    )  # fmt: skip
    allowed_origins: Sequence[str] = _of_access(
        ("*",), "The origins that browsers may call from, CORS", unset="all", nargs="+", metavar="ORIGIN",
    )  # fmt: skip
    api_key_names: Sequence[str] = _of_access(
        (), "The names of the API keys in their order, in the JSON log and in /metrics", unset="key-1, key-2 and so on",
        nargs="+", metavar="NAME",
    )  # fmt: skip
    api_key_targets: Sequence[str] = _of_access(
        (), "Latency targets of an API key's requests, as milliseconds between two tokens and to the first one, such "
        "as `chat=50/500`. `-` is none, and `jobs=flex` is served in what the others leave", nargs="+",
        metavar="NAME=ITL/TTFT",
    )  # fmt: skip
    api_key_all_routes: bool = _of_access(False, "Probes, /metrics and /docs need a key, too")
    max_concurrent_per_key: int | None = _of_access(
        None, "Requests that one API key may have running. One more is answered 429", unset="any number", least=1,
    )  # fmt: skip
    prefix_caching_per_key: bool = _of_access(False, "An API key finds cached prefixes of its own requests only")

    trust_request_chat_template: bool = _of_requests(
        False, "A request may have a chat template of its own, which is a program",
    )  # fmt: skip
    enable_auto_tool_choice: bool = _of_requests(
        True, "A request with tools must say by `tool_choice` whether one is called",
    )  # fmt: skip
    enable_force_include_usage: bool = _of_requests(
        False, "Every chunk of a stream has the usage so far, asked for or not",
    )  # fmt: skip
    return_tokens_as_token_ids: bool = _of_requests(
        False, "Log-probabilities name tokens as `token_id:97`, unless a request says no",
    )  # fmt: skip
    strict_fields: bool = _of_requests(False, "A request with an unknown field is refused, not only logged")
    queue_timeout_s: float | None = _of_requests(
        None, "Seconds that a request may wait for its first step before it is answered 503", unset="any time",
        metavar="S", above=0, most=MOST_SECONDS, name="--queue-timeout",
    )  # fmt: skip
    max_request_logprobs: int = _of_requests(
        DEFAULT_MAX_REQUEST_LOGPROBS, "Log-probabilities of one request: n x max_tokens x (logprobs + 1), and those of "
        "its prompt", least=1,
    )  # fmt: skip

    max_connections: int | None = _of_connections(
        None, "Connections. For one more, the one that has waited longest is closed, or the new one is answered 503",
        unset="what `ulimit -Hn` allows, at most 8192", least=1,
    )  # fmt: skip
    head_timeout_s: float = _seconds(
        20.0, "Seconds for the head of a request, and for the first byte on a connection", name="--head-timeout",
    )  # fmt: skip
    body_timeout_s: float = _seconds(
        30.0, "Seconds within each of which a body must come at 1 KiB/s", name="--body-timeout",
    )  # fmt: skip
    idle_timeout_s: float = _seconds(
        30.0, "Seconds between the requests of a connection; a load balancer's must be shorter", name="--idle-timeout",
    )  # fmt: skip
    send_timeout_s: float = _seconds(
        300.0, "Seconds in which a client must read some of what waits for it", name="--send-timeout",
    )  # fmt: skip
    max_body_memory_mib: int = _of_connections(
        256, "MiB of all requests that are being read. Beyond it they are answered 503", least=1,
        name="--max-body-memory",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_flags(self)
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"--served-model-name: a name is empty, or there is none: {', '.join(self.model_names)!r}")
        keys = (*self.api_keys, *self.admin_api_keys)
        if not all(keys):
            raise ValueError("an API key is empty: everybody would have it")
        if not all(key.isprintable() and key == key.strip() for key in keys):
            raise ValueError("an API key begins or ends with a space, or has a control character: no header has it")
        if self.otlp_traces_endpoint is not None and not _is_url(self.otlp_traces_endpoint):
            message = "is the address of a collector, such as http://localhost:4318/v1/traces"
            raise ValueError(f"--otlp-traces-endpoint {message}, not {self.otlp_traces_endpoint!r}")
        if not 2 * self.max_body_bytes <= self.max_body_memory_mib * 2**20:
            least = -(-2 * self.max_body_bytes // 2**20)
            raise ValueError(f"--max-body-memory is at least {least} MiB, two bodies, not {self.max_body_memory_mib}")
        if len(self.api_key_names) > len(self.api_keys) or len({*self.key_names}) < len(self.key_names):
            raise ValueError(f"--api-key-names: {len(self.api_keys)} keys have at most one name each, all different")
        if self.max_concurrent_per_key is not None and not self.api_keys:
            raise ValueError("--max-concurrent-per-key counts requests by their API key: it needs --api-key")
        if unknown := sorted(set(self.targets_of_keys) - set(self.key_names)):
            raise ValueError(f"{_KEY_TARGETS}: no API key has the name {unknown[0]!r} (--api-key-names)")
        if self.prefix_caching_per_key and not self.api_keys:
            raise ValueError("--prefix-caching-per-key tells clients apart by their API key: it needs --api-key")

    @property
    def key_names(self) -> list[str]:
        """The names of the API keys and then of the admin keys, in their order."""
        unnamed = range(len(self.api_key_names) + 1, len(self.api_keys) + 1)
        admins = range(1, len(self.admin_api_keys) + 1)
        return [*self.api_key_names, *(f"key-{n}" for n in unnamed), *(f"admin-{n}" for n in admins)]

    @property
    def targets_of_keys(self) -> dict[str, tuple[Targets | None, bool]]:
        """The name of an API key -> the targets of its requests, and whether they are `flex`. Raises ValueError."""
        return dict(map(_targets_of_key, self.api_key_targets))


@cache
def _targets_of_key(text: str) -> tuple[str, tuple[Targets | None, bool]]:
    name, _, value = text.partition("=")
    if value == FLEX:
        return name, (None, True)
    try:
        itl, ttft = (None if part == "-" else float(part) for part in value.split("/"))
    except ValueError:
        raise ValueError(f"{_KEY_TARGETS} {text!r}: it is NAME=ITL/TTFT, such as chat=50/500, or NAME={FLEX}") from None
    for target in (itl, ttft):
        if target is not None and not 0 < target <= MOST_TARGET_MS:
            raise ValueError(f"{_KEY_TARGETS} {text!r}: a target is above 0 and at most {MOST_TARGET_MS} milliseconds")
    return name, (Targets(itl_ms=itl, ttft_ms=ttft), False)


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)
