"""The settings of the HTTP side. They are built once, when the server starts, and do not read the environment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from batcher.sampling_table import PARAMETERS
from model.inputs.json_file import read_fields
from model.inputs.limits import MAX_VOCAB_SIZE
from model.inputs.schema import TRUTH, integer, number, number_above

DEFAULT_METRICS_PREFIX = "pallas_serve:"
DEFAULT_MAX_REQUEST_LOGPROBS = 4 * 2**20
DEFAULT_BATCH_FOLDER_GIB = 4
DEFAULT_BATCH_CONCURRENCY = 64
MOST_SECONDS = 10**6
MOST_COUNT = 2**62  # of anything: a larger number overflows
MOST_API_SERVERS = 64
MOST_FOLDER_GIB = 2**20
MOST_BATCH_REQUESTS = 4096  # in the engine at once
TOP_K_OFF = -1  # in requests and files; for the engine 0 is off


def _range_of(name: str) -> msgspec.Meta:
    """The range of a sampling parameter."""
    interval = PARAMETERS[name].range
    assert interval is not None
    return (number_above if interval.low_open else number)(interval.low, interval.high)


class _GenerationFile(msgspec.Struct):
    """The sampling fields of `generation_config.json`, with the ranges of a request's fields. A default outside them
    would make every request fail.

    `transformers.GenerationConfig` reads `"temperature": "hot"` and `"top_p": 7` without an error.
    """

    do_sample: TRUTH | None = None
    temperature: Annotated[float, _range_of("temperature")] | None = None
    top_p: Annotated[float, _range_of("top_p")] | None = None
    top_k: Annotated[int, integer(TOP_K_OFF, 2**31 - 1)] | None = None
    min_p: Annotated[float, _range_of("min_p")] | None = None
    repetition_penalty: Annotated[float, _range_of("repetition_penalty")] | None = None
    max_new_tokens: Annotated[int, integer(1, 2**31 - 1)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """The values of fields that a request leaves out: those of `generation_config.json`, or OpenAI's values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None  # as in vLLM no default, but the most that any request gets

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationDefaults:
        """Reads the fields above from the file; `do_sample: false` means greedy. Without a file, the defaults remain.

        Raises ValueError, with the file's name and all wrong fields, for values that a request may not have.
        """
        path = folder / "generation_config.json"
        if not path.exists():
            return cls()
        file = msgspec.structs.asdict(read_fields(path, _GenerationFile))
        greedy = file.pop("do_sample") is False
        values = {name: value for name, value in file.items() if value is not None}
        return cls(**values | ({"temperature": 0.0} if greedy else {}))

    def overridden(self, text: str, *, where: str) -> GenerationDefaults:
        """A copy with the values of a JSON object instead. Raises ValueError for a value that a request may not have;
        the message begins with `where`."""
        try:
            names = msgspec.json.decode(text, type=dict[str, Any]).keys()
            values = msgspec.structs.asdict(msgspec.json.decode(text, type=_GenerationFile))
        except msgspec.DecodeError as error:
            raise ValueError(f"{where} {text!r}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        if unknown := sorted(names - values.keys()):
            raise ValueError(f"{where}: unknown fields {', '.join(unknown)}; there are {', '.join(values)}")
        greedy = {"temperature": 0.0} if values.pop("do_sample") is False else {}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return replace(self, **given | greedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """The files of TLS, in PEM form, and what is asked of the clients' certificates."""

    certfile: Path  # the server's certificate, with those of the authorities between it and the root
    keyfile: Path | None = None  # None: the key is in `certfile`
    keyfile_password: str | None = None
    ca_certs: Path | None = None  # the authorities of the clients' certificates
    cert_reqs: int = 0  # a client's certificate is not asked for (0), checked if it has one (1), or required (2)
    ciphers: str | None = None  # of TLS 1.2, in OpenSSL's notation; None: Python's choice
    refresh: bool = False  # changed files are loaded while the server runs

    def __post_init__(self) -> None:
        if self.cert_reqs not in (0, 1, 2):
            raise ValueError(f"--ssl-cert-reqs is 0, 1 or 2, not {self.cert_reqs}")
        if self.cert_reqs and self.ca_certs is None:
            raise ValueError("--ssl-cert-reqs needs --ssl-ca-certs, the authorities that sign clients' certificates")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The HTTP side's settings."""

    tokenizer_folder: Path
    vocab_size: int = MAX_VOCAB_SIZE  # the model's; only a tokenizer's special tokens may have ids beyond it
    model_names: tuple[str, ...]  # answers have the first; requests may have any of them
    model_root: str = ""  # the source of the weights, for /v1/models
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_server_count: int = 1  # HTTP processes that share the address and the engines
    uds: Path | None = None  # a Unix socket in place of the host and the port
    tls: TlsFiles | None = None  # None: plain HTTP
    root_path: str = ""  # the path prefix at which a proxy serves this server
    api_keys: tuple[str, ...] = ()  # none: open to all
    api_key_all_routes: bool = False  # health checks and metrics need a key too
    admin_api_keys: tuple[str, ...] = ()  # none: the administrators' routes are closed
    enable_tokenizer_info: bool = False  # the route /tokenizer_info
    allowed_origins: tuple[str, ...] = ("*",)
    chat_template: str | None = None  # replaces the tokenizer's own
    trust_request_chat_template: bool = False  # requests may have templates, which are programs
    enable_auto_tool_choice: bool = True  # tool_choice "auto" is allowed
    reasoning_parser: str | None = None  # how the model marks its reasoning; None: as the template shows it
    tool_call_parser: str | None = None  # the format of the model's calls; None: the one that the template shows
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    batch_folder: Path | None = None  # of files and batches; None: there are none
    batch_folder_gib: float = DEFAULT_BATCH_FOLDER_GIB
    batch_concurrency: int = DEFAULT_BATCH_CONCURRENCY  # requests of all batches that are in the engine at once
    metrics_prefix: str = DEFAULT_METRICS_PREFIX
    version: str = "0.0.0"
    ui: bool = True  # the page at `/`
    force_usage: bool = False  # all streams have usage, even if they do not ask for it
    otlp_traces_endpoint: str | None = None  # the URL that gets a span of each request; None: there are no traces
    debug: bool = False  # the engine's process prints the traceback of its failure
    show_cached_tokens: bool = True  # usage.prompt_tokens_details
    queue_timeout_s: float | None = None  # a request that waits longer is refused; None: no limit
    max_concurrent_per_key: int | None = None  # running requests per key; None: no limit
    prefix_caching_per_key: bool = False  # requests find the cached prefixes of their own API key only
    strict_fields: bool = False  # unknown fields are refused, not ignored
    max_body_bytes: int = 8 * 2**20  # enough for a million token ids; a longer JSON would delay all streams
    max_embedding_inputs: int = 2048  # of one HTTP request
    max_choices: int = 128  # sequences of one HTTP request: prompts times n
    max_request_logprobs: int = DEFAULT_MAX_REQUEST_LOGPROBS  # of one HTTP request: see score_limit
    template_timeout_s: float = 10.0  # for the chat template of one conversation
    grace_period_s: float = 30.0  # after SIGTERM, for running requests
    heartbeat_timeout_s: float = 60.0  # an engine silent for longer is reported as unhealthy
    death_linger_s: float = 3.0  # after the engine's death /health answers 503 for this time, then the server exits
    max_connections: int | None = None  # None: as many as there are descriptors, up to MOST_CONNECTIONS
    head_timeout_s: float = 20.0  # for a request's head from its first byte, and for a new connection's first byte
    body_timeout_s: float = 30.0  # in which as much of a body must come as at MIN_BODY_RATE
    idle_timeout_s: float = 30.0  # between requests on one connection
    send_timeout_s: float = 300.0  # for a client to read some of the bytes sent to it
    max_body_memory_mib: int = 256  # of all requests that one HTTP process is reading; beyond it, they are refused

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"--served-model-name: a name is empty, or there is none: {', '.join(self.model_names)!r}")
        if not 1 <= self.api_server_count <= MOST_API_SERVERS:
            message = f"--api-server-count is 1 to {MOST_API_SERVERS}, not {self.api_server_count}"
            raise ValueError(f"{message}: the HTTP processes that share the address")
        check_range("--port", self.port, 0, 65535)
        keys = (*self.api_keys, *self.admin_api_keys)
        if not all(keys):
            raise ValueError("an API key is empty: everybody would have it")
        if not all(key.isprintable() and key == key.strip() for key in keys):
            raise ValueError("an API key begins or ends with a space, or has a control character: no header has it")
        if self.otlp_traces_endpoint is not None and not _is_url(self.otlp_traces_endpoint):
            message = "is the address of a collector, such as http://localhost:4318/v1/traces"
            raise ValueError(f"--otlp-traces-endpoint {message}, not {self.otlp_traces_endpoint!r}")
        for name in ("grace_period_s", "heartbeat_timeout_s", "death_linger_s", "template_timeout_s"):
            check_range(name, getattr(self, name), 0, MOST_SECONDS)
        for name in ("max_body_bytes", "max_embedding_inputs", "max_choices"):
            check_range(name, getattr(self, name), 1, MOST_COUNT)
        check_range("--batch-folder-size", self.batch_folder_gib, 2**-20, MOST_FOLDER_GIB)
        check_range("--batch-concurrency", self.batch_concurrency, 1, MOST_BATCH_REQUESTS)
        for name in ("max_request_logprobs", "max_concurrent_per_key", "max_connections"):
            check_range(flag_of(name), getattr(self, name), 1, MOST_COUNT)
        for name in ("head_timeout_s", "body_timeout_s", "idle_timeout_s", "send_timeout_s", "queue_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= MOST_SECONDS:
                raise ValueError(f"{flag_of(name)} must be above 0 and at most {MOST_SECONDS} seconds, not {seconds:g}")
        check_range("--max-body-memory", self.max_body_memory_mib, 1, MOST_COUNT)
        if not 2 * self.max_body_bytes <= self.max_body_memory_mib * 2**20:
            least = -(-2 * self.max_body_bytes // 2**20)
            raise ValueError(f"--max-body-memory is at least {least} MiB, two bodies, not {self.max_body_memory_mib}")
        if self.max_concurrent_per_key is not None and not self.api_keys:
            raise ValueError("--max-concurrent-per-key counts requests by their API key: it needs --api-key")
        if self.prefix_caching_per_key and not self.api_keys:
            raise ValueError("--prefix-caching-per-key tells clients apart by their API key: it needs --api-key")


def flag_of(name: str) -> str:
    """The command-line flag of a field of `Settings`."""
    return "--" + name.removesuffix("_s").removesuffix("_mib").replace("_", "-")


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raises ValueError, with the name of the flag or field, for a number that is out of range. None is no number."""
    if value is None or least <= value <= most:
        return
    limit = f"at most {most}" if value > most else f"at least {least}"
    raise ValueError(f"{name} must be {limit}, not {value}")


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.hostname)
