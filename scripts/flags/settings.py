"""The engine's settings: one frozen record, built from flags or keywords and sent to the engine's process."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from batcher.config import DEFAULT_MAX_WAITING, DEFAULT_PIPELINE_DEPTH
from batcher.request import MOST_TARGET_MS, LogprobsMode, Pooling, Targets
from model.inputs.paths import check_local, place
from model.loading.source import DEMO, ModelSource, resolve
from model.quantization.checkpoint_form import STORED_METHODS
from model.quantization.forms import FORM_NAMES
from scripts.flags.compatibility import TABLE, log_warnings
from scripts.flags.lora import NamedWeights, lora_modules, named_models
from scripts.flags.parsing import KeywordParser, flag_words, json_object, parse_flags, structure
from scripts.flags.speculation import EXAMPLE as SPECULATION_EXAMPLE
from scripts.flags.speculation import FLAG as SPECULATION
from scripts.flags.speculation import SpeculativeConfig
from server.engine.hosts.cluster import Cluster
from server.engine.kv_event_stream import HashAlgorithm
from server.engine.kv_events import FLAG as KV_EVENTS
from server.engine.kv_events import KvEventsConfig
from server.flag import MOST_SECONDS, add_flags, check_flags, flag_name, setting, values_of

DEVICES = ("auto", "cpu", "tpu", "cuda")
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
_GROUPS = {
    "model": "The checkpoint, and the types it is computed in.",
    "batching": "What the requests of one step share.",
    "device": "The chips, their memory, and the programs for them.",
    "kv_offloading": "Where prefixes go for which the device has no pages left, and from where they come back.",
    "lora": "LoRA adapters, which requests name as their model.",
    "models": "More models in the same process. Those of --model's shape and form share its programs and K/V pages.",
}
_of_model, _of_batching, _of_device, _of_offloading, _of_lora, _of_models = (
    partial(setting, group=group) for group in _GROUPS
)
_KV_EVENTS_EXAMPLE = """'{"enable_kv_cache_events": true, "topic": "kv@POD@MODEL"}'"""
# The limit of counts that have no other limit. No machine has so many. A larger number is a typing error, and would
# cause an error of memory.
_MANY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The settings of an engine, with their flags. None: the engine chooses, from the model and the device.

    Flags with a counterpart in vLLM have vLLM's names.
    """

    GROUPS: ClassVar = _GROUPS

    model: str = _of_model(
        DEMO, "A checkpoint folder, a GGUF file, a Hugging Face name, a folder in a bucket, or preset:NAME with "
        "--load-format dummy",
    )  # fmt: skip
    revision: str | None = _of_model(
        None, "The branch, tag or commit of a model of the Hugging Face hub", unset="the newest commit", metavar="REF",
    )  # fmt: skip
    load_format: str = _of_model(
        "auto", "The form of the weights. `auto` finds it, `dummy` draws random weights on the device",
        choices=("auto", "safetensors", "orbax", "dummy"),
    )  # fmt: skip
    dtype: str = _of_model(
        "auto", "The type of the computation. `auto` is the checkpoint's own, and float32 on a CPU",
        choices=("auto", "bfloat16", "float32"),
    )  # fmt: skip
    quantization: str | None = _of_model(
        None, "The weights are quantised at load (int8, fp8, int4), or must be stored in this form (the others)",
        unset="they stay as they are stored", choices=(*FORM_NAMES, *STORED_METHODS), also=("-q",),
    )  # fmt: skip
    kv_cache_dtype: str = _of_model(
        "auto", "The type of the K/V pages. 8 bits hold twice the tokens; `auto` is that of the computation",
        choices=KV_CACHE_DTYPES,
    )  # fmt: skip
    calculate_kv_scales: bool = _of_model(
        False, "The scales of 8-bit K/V are measured at the start, also if the checkpoint has some",
    )  # fmt: skip
    max_model_len: int | None = _of_model(
        None, "Tokens of prompt and output together", unset="the length that the model was trained for, or the longest "
        "for which the memory has room", least=1, most=_MANY,
    )  # fmt: skip
    enable_embeddings: bool = _of_model(False, "The server answers /v1/embeddings, too")
    pooling_type: str = _of_model(
        Pooling.LAST.value, "An embedding is the vector of the `last` token or the `mean` of all",
        choices=tuple(Pooling), metavar="TYPE",
    )  # fmt: skip
    max_num_seqs: int | None = _of_batching(
        None, "Sequences that run at once", unset="64 on a CPU, 256 on a chip", least=1, most=2**16,
    )  # fmt: skip
    max_num_batched_tokens: int | None = _of_batching(
        None, "Tokens of one step, those of prompts and of decodes together", unset="512 on a CPU, 2048 on a chip",
        least=1, most=2**20,
    )  # fmt: skip
    logprobs_mode: str = _of_model(
        LogprobsMode.RAW_LOGPROBS.value, "The numbers that answers have as log-probabilities of generated tokens: raw "
        "ones are the model's own, processed ones those after all that steers the draw", choices=tuple(LogprobsMode),
        metavar="MODE",
    )  # fmt: skip
    target_itl: float | None = _of_batching(
        None, "Milliseconds between two tokens that every request is to keep. Steps then give prompts as many tokens "
        "as this leaves time for", metavar="MS", above=0, most=MOST_TARGET_MS,
    )  # fmt: skip
    target_ttft: float | None = _of_batching(
        None, "Milliseconds to the first token. The prompt whose target ends first goes first", metavar="MS", above=0,
        most=MOST_TARGET_MS,
    )  # fmt: skip
    target_percentile: float = _of_batching(
        99, "The percentage of the times between two tokens that must be within the target", metavar="P", least=50,
        most=99.99,
    )  # fmt: skip
    when_late: str = _of_batching(
        "serve", "Requests that would miss their --target-ttft are answered 429 (`refuse`), or served after all others",
        choices=("serve", "refuse"), metavar="WHAT",
    )  # fmt: skip
    enable_prefix_caching: bool = _of_batching(True, "Pages of earlier prompts are not used again")
    kv_events_config: str | Mapping[str, Any] | None = _of_batching(
        None, f"Events of stored pages for routers, such as {_KV_EVENTS_EXAMPLE}. They hold the tokens of all prompts "
        "and answers. To other machines they go with `key_file`, or without a key if `show_prompts_to_network` is true",
        metavar="JSON",
    )  # fmt: skip
    prefix_caching_hash_algo: str = _of_batching(
        HashAlgorithm.SHA256_CBOR.value, "The hashes of pages in these events. PYTHONHASHSEED is their seed",
        choices=tuple(HashAlgorithm), metavar="NAME",
    )  # fmt: skip
    speculative_config: str | Mapping[str, Any] | None = _of_batching(
        None, f"Drafts of several tokens a step, such as {SPECULATION_EXAMPLE}", metavar="JSON", also=("-sc",),
    )  # fmt: skip
    max_queue: int = _of_batching(
        DEFAULT_MAX_WAITING, "Requests that may wait. One more is answered 429", least=0, most=_MANY,
        also=("--max-num-queued-reqs",),
    )  # fmt: skip
    pipeline_depth: int = _of_batching(
        DEFAULT_PIPELINE_DEPTH, "Steps in flight. With 1, the host and the device take turns", least=1, most=64,
    )  # fmt: skip
    seed: int | None = _of_batching(
        None, "The seed of the draws of requests without a seed of their own", unset="random",
    )  # fmt: skip
    device: str = _of_device("auto", "Where the model runs. `auto` takes the machine's chips", choices=DEVICES)
    tensor_parallel_size: int | None = _of_device(
        None, "Chips that share the model", unset="the least power of two on which it fits", least=1, most=2**16,
        also=("-tp",),
    )  # fmt: skip
    attention_backend: str = _of_device(
        "auto", "The kernels: tpu, gpu, gpu-mma, tpu-jax, cpu or reference; `-interpret` after one of the first "
        "three interprets them on a CPU", metavar="B",
    )  # fmt: skip
    memory_utilization: float = _of_device(
        0.9, "The share of the device's memory for weights, programs and K/V pages together", metavar="SHARE", above=0,
        most=1, also=("--gpu-memory-utilization", "--device-memory-utilization"),
    )  # fmt: skip
    page_size: int | None = _of_device(
        None, "Tokens of one K/V page", unset="by the device, and said at the start", least=1, most=2**16,
        also=("--block-size",),
    )  # fmt: skip
    num_pages: int | None = _of_device(
        None, "K/V pages", unset="as many as the memory has room for", least=1, most=_MANY,
        also=("--num-gpu-blocks-override",),
    )  # fmt: skip
    step_timeout: float | None = _of_device(
        None, "Seconds after which a step that does not return ends the server; 0: never", unset="30 on a chip, 0 on a "
        "CPU", metavar="S", least=0, most=MOST_SECONDS,
    )  # fmt: skip
    compile_all_first: bool = _of_device(
        False, "All programs are compiled before the server is ready. By default a CPU compiles most of them while it "
        "serves",
    )  # fmt: skip
    self_test: str = _of_device(
        "kept", "When a start compares the attention kernels with float32: `always`, `never`, or unless they have "
        "passed before with the same code, versions, chip and shapes (`kept`)",
        choices=("always", "kept", "never"), metavar="WHEN",
    )  # fmt: skip
    compile_cache: str | None = _of_device(
        None, "The folder of compiled programs; `none` keeps none", unset="in the user's cache folder", metavar="DIR",
        also=("--export-cache",),
    )  # fmt: skip
    kv_offloading_size: float = _of_offloading(
        0, "GiB of the host's memory for K/V pages of prefixes, for each engine; 0: evicted pages are computed again",
        metavar="GIB", least=0, most=2**16,
    )  # fmt: skip
    kv_offloading_path: str | None = _of_offloading(
        None, "The folder behind the host's memory. A later start finds its prefixes there",
        metavar="DIR",
    )  # fmt: skip
    kv_offloading_disk: float = _of_offloading(
        16, "GiB of the files in --kv-offloading-path. The least recently used ones are deleted", metavar="GIB",
        above=0, most=2**20,
    )  # fmt: skip
    enable_lora: bool = _of_lora(False, "Requests may name LoRA adapters")
    lora_modules: Sequence[str | Mapping[str, Any]] | None = _of_lora(
        None, 'The adapters of the start: NAME=PATH, or \'{"name": "NAME", "path": "PATH"}\'', nargs="+",
        metavar="NAME=PATH",
    )  # fmt: skip
    lora_folder: Path | None = _of_lora(  # noqa: RUF009
        None, "An unknown model of a request is the adapter in this folder's folder of that name", metavar="DIR",
    )  # fmt: skip
    max_loras: int = _of_lora(8, "Adapters that run at once", least=1, most=1024)
    max_lora_rank: int = _of_lora(
        16, "The highest rank of an adapter. All take the memory of this one", least=1, most=512,
    )  # fmt: skip
    max_cpu_loras: int | None = _of_lora(
        None, "Adapters in the host's memory. Others are read again when they are needed", unset="twice --max-loras",
        least=1, most=2**16,
    )  # fmt: skip
    models: Sequence[str] | Mapping[str, str] | None = _of_models(
        None, "More models, which requests name: checkpoints, or LoRA adapters, which are merged into --model",
        nargs="+", metavar="NAME=PATH",
    )  # fmt: skip
    models_folder: Path | None = _of_models(  # noqa: RUF009
        None, "An unknown model of a request is the one in this folder's folder of that name", metavar="DIR",
    )  # fmt: skip
    max_resident_models: int | None = _of_models(
        None, "Models of one shape and form whose weights are on the device at once", unset="as many as leave half of "
        "the K/V pages, and 2 on several hosts", least=2, most=2**16,
    )  # fmt: skip
    models_host_memory: float | None = _of_models(
        None, "GiB of the host's memory, for each engine, for the weights of models that are not on the device. Others "
        "are read again", unset="half of what is free, divided among the engines; on a CPU 0", metavar="GIB", least=0,
        most=2**16,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_flags(self)
        for name in ("model", "compile_cache"):
            place(getattr(self, name) or "", flag_name(EngineSettings, name))
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and rows is not None and tokens <= rows:
            raise ValueError(
                f"--max-num-batched-tokens {tokens} must be above --max-num-seqs {rows}: a step takes a token of every "
                "running request, and at least one of a prompt"
            )
        _ = self.speculation  # raises ValueError if it cannot be used
        self._check_offloading()
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError(f"{KV_EVENTS} needs a prefix cache: there are no events with --no-enable-prefix-caching")
        self._check_lora()
        self._check_models()

    def _check_offloading(self) -> None:
        check_local(self.kv_offloading_path or "", "--kv-offloading-path")
        if self.kv_offloading_path is not None and not self.kv_offloading_size:
            raise ValueError(
                "--kv-offloading-path needs --kv-offloading-size: pages come to files by the host's memory"
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError("--kv-offloading-size keeps prefixes: it excludes --no-enable-prefix-caching")

    def _check_lora(self) -> None:
        for name in ("lora_modules", "lora_folder"):
            if getattr(self, name) and not self.enable_lora:
                raise ValueError(f"{flag_name(EngineSettings, name)} needs --enable-lora")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"--max-cpu-loras {self.max_cpu_loras} must be at least --max-loras {self.max_loras}: adapters that "
                "run are in the host's memory, too"
            )
        lora_modules(self.lora_modules or ())

    def _check_models(self) -> None:
        for name in ("max_resident_models", "models_host_memory"):
            if getattr(self, name) is not None and not self.has_models:
                raise ValueError(f"{flag_name(EngineSettings, name)} needs --models or --models-folder")
        for name in ("lora_folder", "models_folder"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                message = f"{folder}: there is no such folder on this machine"
                raise ValueError(f"{flag_name(EngineSettings, name)} {message}")
        named_models(self.models or ())

    def source(self) -> ModelSource:
        """The model. Its files are downloaded first if it is on the hub. Raises ValueError if there is none."""
        return resolve(self.model, revision=self.revision, weights=self.load_format != "dummy")

    @property
    def weight_form(self) -> str | None:
        """The form that the weights get at load; None: the stored one."""
        return None if self.quantization in STORED_METHODS else self.quantization

    @property
    def num_adapter_slots(self) -> int:
        """The number of LoRA adapters that run at once; 0: requests have none."""
        return self.max_loras if self.enable_lora else 0

    @property
    def adapters(self) -> list[NamedWeights]:
        return lora_modules(self.lora_modules or ())

    @property
    def targets(self) -> Targets | None:
        """The latency targets of requests that name none; None: they have none."""
        if self.target_itl is None and self.target_ttft is None:
            return None
        percentile = self.target_percentile / 100
        return Targets(itl_ms=self.target_itl, ttft_ms=self.target_ttft, percentile=percentile)

    @property
    def has_models(self) -> bool:
        """Whether there may be models besides `model`."""
        return bool(self.models) or self.models_folder is not None

    @property
    def named_models(self) -> list[NamedWeights]:
        return named_models(self.models or ())

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`. Raises ValueError if it cannot be used."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """The parsed `kv_events_config`; None: no events are published. Raises ValueError if it cannot be used."""
        if self.kv_events_config is None:
            return None
        fields = json_object(KV_EVENTS, self.kv_events_config, _KV_EVENTS_EXAMPLE)
        config = structure(KV_EVENTS, fields, KvEventsConfig)
        return config if config.is_on else None

    @property
    def pooling(self) -> Pooling | None:
        """The pooling of requests that embed; None: embeddings are off."""
        return Pooling(self.pooling_type) if self.enable_embeddings else None

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> EngineSettings:
        """The settings from parsed flags, whose warnings are logged. Raises ValueError if a value is out of range."""
        log_warnings(args)
        return cls(**values_of(cls, args))

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineSettings:
        """The settings from keywords, as `read_keywords`."""
        return read_keywords(keywords)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedSettings:
    """The settings that the engine's process gets."""

    engine: EngineSettings
    tokenizer: Path  # a folder or a GGUF file, for grammars and end tokens
    cluster: Cluster | None = None  # the hosts of one engine; None: this host alone
    replica: int = 0  # the engine's number among `num_replicas` engines, which divide this host's chips
    num_replicas: int = 1
    compile_turn: Path | None = None  # the file of `compiling_first`; None: one engine, or no cache of programs


def read_keywords(keywords: Mapping[str, Any], *others: type[Any]) -> tuple[EngineSettings, argparse.Namespace]:
    """The settings from keywords, the names of flags, also of vLLM's; and the values of all flags, with those that the
    classes `others` declare. Raises ValueError for an unknown keyword, and for one that is refused as a flag."""
    names = {field.name for field in dataclasses.fields(EngineSettings)}
    values = {name: value for name, value in keywords.items() if name in names and not isinstance(value, str)}
    parser = KeywordParser(allow_abbrev=False, add_help=False)
    add_engine_flags(parser)
    for declared in others:
        add_flags(parser, declared)
    rest = [(name.replace("_", "-"), value) for name, value in keywords.items() if name not in values]
    args = parse_flags(parser, [word for name, value in rest for word in flag_words(name, value, "keywords")])
    log_warnings(args)
    return EngineSettings(**values_of(EngineSettings, args) | values), args


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that runs an engine."""
    add_flags(parser, EngineSettings)
    batching = next(group for group in parser._action_groups if group.title == "batching")
    for flag, field in TABLE["fields"].items():
        batching.add_argument(
            flag, metavar="VALUE", help=f"The `{field.rpartition('.')[2]}` of {SPECULATION}, as a plain flag."
        )
