"""The engine's settings: one frozen record, built from flags or keywords and sent to the engine's process."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batcher.request import Pooling
from model.inputs.paths import is_url, place
from model.loading.source import DEMO
from model.quantization.forms import FORM_NAMES
from scripts.wiring.speculation import SpeculativeConfig, merged
from server.engine.hosts.cluster import Cluster
from server.settings import MOST_SECONDS, check_range

DEVICES = ("auto", "cpu", "tpu", "cuda")
DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = FORM_NAMES
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
STEP_BUDGETS = ("tokens", "time")
SCHEDULING = ("continuous", "static")
POOLING_TYPES = tuple(Pooling)
_MANY = 2**31 - 1
# The least and the greatest value of each number. None of them reaches what a machine has: they tell a slip of the pen
# before it becomes an error of memory.
RANGES = {
    "max_model_len": (1, _MANY),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "long_prefill_token_threshold": (0, _MANY),
    "max_num_partial_prefills": (1, _MANY),
    "page_size": (1, 2**16),
    "num_pages": (1, _MANY),
    "tensor_parallel_size": (1, 2**16),
    "num_scheduler_steps": (1, 1024),
    "max_queue": (0, _MANY),
    "pipeline_depth": (1, 64),
    "step_timeout": (0, MOST_SECONDS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The settings of an engine. None: the engine chooses, from the model and the device."""

    model: str = DEMO
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None  # None: as the weights are stored
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0  # 0: a prompt may take a whole step
    max_num_partial_prefills: int | None = None  # None: any number
    step_budget: str = "tokens"  # one of STEP_BUDGETS
    memory_utilization: float = 0.9
    page_size: int | None = None
    num_pages: int | None = None
    tensor_parallel_size: int | None = None  # chips that share the model
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    scheduling: str = "continuous"
    speculative_config: str | Mapping[str, Any] | None = None  # JSON or its object; None: no drafts
    num_scheduler_steps: int = 1  # most decode steps of one program
    enable_embeddings: bool = False
    pooling_type: str = Pooling.LAST.value
    max_queue: int = 1024
    pipeline_depth: int = 2
    step_timeout: float | None = None  # seconds; 0: none
    compile_all_first: bool = False  # all programs, also those that could be compiled while serving
    compile_cache: str | None = None  # a folder, or "none"; None: the user's cache folder
    export_cache: str | None = None  # a folder; None: executables are not kept
    seed: int | None = None

    def __post_init__(self) -> None:
        choices = {
            "device": DEVICES,
            "dtype": DTYPES,
            "load_format": LOAD_FORMATS,
            "quantization": (None, *QUANTIZATIONS),
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "scheduling": SCHEDULING,
            "pooling_type": POOLING_TYPES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{flag(name)} {getattr(self, name)!r}: it can be one of {', '.join(filter(None, allowed))}"
                )
        for name in ("model", "compile_cache"):
            place(getattr(self, name) or "", flag(name))
        if is_url(self.export_cache or ""):
            raise ValueError(
                f"--export-cache {self.export_cache!r}: executables run as this user's code, so they are kept in a "
                "folder of this machine that only this user can write to; --compile-cache may be in a bucket"
            )
        for name, limits in RANGES.items():
            check_range(flag(name), getattr(self, name), *limits)
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and rows is not None and tokens <= rows:
            raise ValueError(
                f"--max-num-batched-tokens {tokens} must be above --max-num-seqs {rows}: a step takes a token of every "
                "running request, and at least one of a prompt"
            )
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"--memory-utilization is a share above 0 and at most 1, not {self.memory_utilization}")
        if self.step_budget not in STEP_BUDGETS:
            raise ValueError(f"--step-budget is one of {', '.join(STEP_BUDGETS)}, not {self.step_budget!r}")
        if self.scheduling == "static" and self.step_budget != "tokens":
            raise ValueError("--step-budget time needs --scheduling continuous: static batches compute whole prompts")
        if self.scheduling == "static" and (self.long_prefill_token_threshold or self.max_num_partial_prefills):
            raise ValueError(
                "--long-prefill-token-threshold and --max-num-partial-prefills need --scheduling continuous: static "
                "batches compute all their prompts first"
            )
        if self.num_scheduler_steps > 1 and (self.speculation is not None or self.scheduling == "static"):
            raise ValueError(
                "--num-scheduler-steps needs --scheduling continuous and no --speculative-config: drafts are made from "
                "the text that each step stores, and a program of several steps stores none; a static batch takes one "
                "step a program"
            )
        if self.speculation is not None and self.scheduling == "static":
            raise ValueError("--speculative-config needs --scheduling continuous: static batches have no drafts")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`. Raises ValueError if it cannot be used."""
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)

    @property
    def pooling(self) -> Pooling | None:
        """Of requests that embed; None: there can be none."""
        return Pooling(self.pooling_type) if self.enable_embeddings else None

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> EngineSettings:
        """The settings from parsed flags. Raises ValueError if a value is out of range."""
        asked = {name: getattr(args, name) for name in cls.field_names()}
        plain = {name: getattr(args, f"spec_{name}", None) for name in ("method", "model", "tokens")}
        return cls(**asked | {"speculative_config": merged(asked["speculative_config"], **plain)})

    @classmethod
    def from_keywords(cls, **keywords: Any) -> EngineSettings:
        """The settings from keywords. Raises ValueError for an unknown keyword."""
        unknown = sorted(set(keywords) - set(cls.field_names()))
        if unknown:
            raise ValueError(f"unknown settings {', '.join(unknown)}; there are {', '.join(cls.field_names())}")
        return cls(**keywords)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedSettings:
    """The settings that the engine's process gets."""

    engine: EngineSettings
    tokenizer: Path  # a folder or a GGUF file, for grammars and end tokens
    cluster: Cluster | None = None  # the hosts of one engine; None: this host alone
    replica: int = 0  # the engine's number among `num_replicas` engines, which divide this host's chips
    num_replicas: int = 1
    compile_turn: Path | None = None  # the file of `CompileTurn`; None: there is one engine, or no cache of programs


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that runs an engine. Flags with a counterpart in vLLM have vLLM's names."""
    _add_model_flags(parser.add_argument_group("model", "The checkpoint, and the types it is computed in."))
    _add_batching_flags(parser.add_argument_group("batching", "What the requests of one step share."))
    _add_device_flags(parser.add_argument_group("device", "The chips, their memory, and the programs for them."))


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", default=DEMO,
        help="A checkpoint folder, a GGUF file, a Hugging Face name, a folder in a bucket, or preset:NAME with "
        "--load-format dummy (default: the demo).",
    )  # fmt: skip
    group.add_argument(
        "--load-format", default="auto", choices=LOAD_FORMATS,
        help="The form of the weights. `auto` finds it, `dummy` draws random weights on the device (default: auto).",
    )  # fmt: skip
    group.add_argument(
        "--dtype", default="auto", choices=DTYPES,
        help="The type of the computation. `auto` is the checkpoint's own, and float32 on a CPU (default: auto).",
    )  # fmt: skip
    group.add_argument(
        "--quantization", "-q", choices=QUANTIZATIONS,
        help="The weights are quantised to 8 or 4 bits at load (default: they stay as they are stored).",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES,
        help="The type of the K/V pages. 8 bits hold twice the tokens; `auto` is that of the computation "
        "(default: auto).",
    )  # fmt: skip
    group.add_argument(
        "--calculate-kv-scales", action="store_true",
        help="The scales of 8-bit K/V are measured at the start, also if the checkpoint has some.",
    )  # fmt: skip
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="Tokens of prompt and output together (default: the length that the model was trained for, or the longest "
        "for which the memory has room).",
    )  # fmt: skip
    group.add_argument(
        "--enable-embeddings", action="store_true", help="The server answers /v1/embeddings, too."
    )  # fmt: skip
    group.add_argument(
        "--pooling-type", default=Pooling.LAST.value, choices=POOLING_TYPES, metavar="TYPE",
        help="An embedding is the vector of the `last` token or the `mean` of all (default: last).",
    )  # fmt: skip


def _add_batching_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N",
        help="Sequences that run at once (default: 64 on a CPU, 256 on a chip).",
    )  # fmt: skip
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N",
        help="Tokens of one step, those of prompts and of decodes together (default: 512 on a CPU, 2048 on a chip).",
    )  # fmt: skip
    group.add_argument(
        "--long-prefill-token-threshold", type=int, default=0, metavar="N",
        help="Tokens of one prompt that a step computes at most; 0: a prompt may take a whole step (default: 0).",
    )  # fmt: skip
    group.add_argument(
        "--max-num-partial-prefills", type=int, metavar="N",
        help="Longer prompts that are computed at once; shorter ones do not wait for them (default: any number).",
    )  # fmt: skip
    group.add_argument(
        "--step-budget", default="tokens", metavar="KIND",
        help="The budget of a step counts `tokens` or estimated `time`, which a long context makes longer "
        "(default: tokens).",
    )  # fmt: skip
    group.add_argument(
        "--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false",
        help="Pages of earlier prompts are not used again.",
    )  # fmt: skip
    group.add_argument("--enable-prefix-caching", action="store_true", default=True, help=argparse.SUPPRESS)
    group.add_argument(
        "--scheduling", default="continuous", choices=SCHEDULING,
        help="Each step is planned anew (`continuous`), or a batch runs until its longest request ends (`static`, a "
        "baseline for measurements) (default: continuous).",
    )  # fmt: skip
    group.add_argument(
        "--speculative-config", metavar="JSON",
        help="Drafts of several tokens a step, such as "
        """'{"method": "ngram", "num_speculative_tokens": 3}' (default: none).""",
    )  # fmt: skip
    group.add_argument("--spec-method", help="The `method` of --speculative-config, as a plain flag.")
    group.add_argument("--spec-model", help="The `model` of --speculative-config, as a plain flag.")
    group.add_argument(
        "--spec-tokens", type=int, help="The `num_speculative_tokens` of --speculative-config, as a plain flag."
    )  # fmt: skip
    group.add_argument(
        "--num-scheduler-steps", type=int, default=1, metavar="N",
        help="Decode steps of one program at most, while no request waits (default: 1).",
    )  # fmt: skip
    group.add_argument(
        "--max-queue", type=int, default=1024, metavar="N",
        help="Requests that may wait. One more is answered 429 (default: 1024).",
    )  # fmt: skip
    group.add_argument(
        "--pipeline-depth", type=int, default=2, metavar="N",
        help="Steps in flight. With 1, the host and the device take turns (default: 2).",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, help="The seed of the draws of requests without a seed of their own (default: random)."
    )  # fmt: skip


def _add_device_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device", default="auto", choices=DEVICES, help="Where the model runs (default: auto, the machine's chips)."
    )  # fmt: skip
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N",
        help="Chips that share the model (default: the least power of two on which it fits).",
    )  # fmt: skip
    group.add_argument(
        "--attention-backend", default="auto", metavar="B",
        help="The kernels: tpu, gpu, gpu-mma, cpu or reference; `-interpret` after one of the first three interprets "
        "them on a CPU (default: auto).",
    )  # fmt: skip
    group.add_argument(
        "--memory-utilization", "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="The share of the device's memory for weights, programs and K/V pages together (default: 0.9).",
    )  # fmt: skip
    group.add_argument(
        "--page-size", "--block-size", type=int, metavar="N",
        help="Tokens of one K/V page (default: by the device, and said at the start).",
    )  # fmt: skip
    group.add_argument(
        "--num-pages", "--num-gpu-blocks-override", type=int, metavar="N",
        help="K/V pages (default: as many as the memory has room for).",
    )  # fmt: skip
    group.add_argument(
        "--step-timeout", type=float, metavar="S",
        help="Seconds after which a step that does not return ends the server; 0: never (default: 30 on a chip, 0 on "
        "a CPU).",
    )  # fmt: skip
    group.add_argument(
        "--compile-all-first", action="store_true",
        help="All programs are compiled before the server is ready. By default a CPU compiles most of them while it "
        "serves.",
    )  # fmt: skip
    group.add_argument(
        "--compile-cache", metavar="DIR",
        help="The folder of compiled programs; `none` keeps none (default: in the user's cache folder).",
    )  # fmt: skip
    group.add_argument(
        "--export-cache", metavar="DIR",
        help="The folder of loaded executables, with which later starts do not compile (default: none).",
    )  # fmt: skip
