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

DEVICES = ("auto", "cpu", "tpu", "cuda")
DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = FORM_NAMES
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
STEP_BUDGETS = ("tokens", "time")
SCHEDULING = ("continuous", "static")
POOLING_TYPES = tuple(Pooling)


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
        counts = (
            "num_scheduler_steps",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "num_pages",
            "tensor_parallel_size",
        )
        for name in ("max_model_len", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} must be at least 1, not {value}")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"--memory-utilization is a share above 0 and at most 1, not {self.memory_utilization}")
        if self.pipeline_depth < 1:
            raise ValueError(f"--pipeline-depth must be at least 1, not {self.pipeline_depth}")
        if self.step_timeout is not None and self.step_timeout < 0:
            raise ValueError(f"--step-timeout must not be negative, not {self.step_timeout:g}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"--long-prefill-token-threshold must not be negative, not {self.long_prefill_token_threshold}"
            )
        if self.max_num_partial_prefills is not None and self.max_num_partial_prefills < 1:
            raise ValueError(f"--max-num-partial-prefills must be at least 1, not {self.max_num_partial_prefills}")
        if self.step_budget not in STEP_BUDGETS:
            raise ValueError(f"--step-budget is one of {', '.join(STEP_BUDGETS)}, not {self.step_budget!r}")
        if self.scheduling == "static" and self.step_budget != "tokens":
            raise ValueError("--step-budget time needs --scheduling continuous: static batches compute whole prompts")
        if self.scheduling == "static" and (self.long_prefill_token_threshold or self.max_num_partial_prefills):
            raise ValueError(
                "--long-prefill-token-threshold and --max-num-partial-prefills need --scheduling continuous: static "
                "batches compute all their prompts first"
            )
        if self.max_queue < 0:
            raise ValueError(f"--max-queue must not be negative, not {self.max_queue}")
        if self.num_scheduler_steps > 1 and (self.speculation is not None or self.scheduling == "static"):
            raise ValueError(
                "--num-scheduler-steps needs --scheduling continuous and no --speculative-config: drafts and static "
                "batches take one step a program"
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
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default=DEMO,
        help="a checkpoint folder, a Hugging Face name, preset:NAME with --load-format dummy (default: the demo)",
    )
    model.add_argument("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights")
    model.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: the checkpoint's; float32 on a CPU")
    model.add_argument("--quantization", "-q", choices=QUANTIZATIONS, help="8 or 4 bits a weight (default: as stored)")
    model.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES,
        help="fp8, int8: twice the tokens (auto: as computed)",
    )  # fmt: skip
    model.add_argument(
        "--calculate-kv-scales", action="store_true", help="of 8-bit K/V, although the checkpoint brings some"
    )
    model.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and output together")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    engine.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step")
    engine.add_argument(
        "--long-prefill-token-threshold", type=int, default=0, metavar="N", help="tokens of one prompt in one step"
    )  # fmt: skip
    engine.add_argument("--max-num-partial-prefills", type=int, metavar="N", help="longer prompts computed at once")
    engine.add_argument("--step-budget", default="tokens", metavar="KIND", help="tokens (the default) or time")
    engine.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    engine.add_argument("--enable-prefix-caching", action="store_true", default=True, help=argparse.SUPPRESS)
    engine.add_argument("--scheduling", default="continuous", choices=SCHEDULING)
    engine.add_argument(
        "--speculative-config", metavar="JSON",
        help="drafts; or --spec-method, --spec-model, --spec-tokens",
    )  # fmt: skip
    for name, kind in (("method", str), ("model", str), ("tokens", int)):
        engine.add_argument(f"--spec-{name}", type=kind, help=argparse.SUPPRESS)
    engine.add_argument(
        "--num-scheduler-steps", type=int, default=1, metavar="N", help="most decode steps of one program (default: 1)"
    )
    engine.add_argument("--enable-embeddings", action="store_true", help="serve /v1/embeddings, too")
    engine.add_argument(
        "--pooling-type",
        default=Pooling.LAST.value,
        choices=POOLING_TYPES,
        metavar="TYPE",
        help="of embeddings: last, mean",
    )
    engine.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait; then 429")
    engine.add_argument(
        "--pipeline-depth", type=int, default=2, metavar="N", help="steps in flight (default: 2; 1: no overlap)"
    )
    engine.add_argument(
        "--step-timeout", type=float, metavar="S",
        help="of a step on a chip (default: 30; on a CPU 0: never)",
    )  # fmt: skip
    engine.add_argument("--seed", type=int, help="of requests that bring none (default: random)")
    device = parser.add_argument_group("device")
    device.add_argument("--device", default="auto", choices=DEVICES)
    device.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N",
        help="chips that share the model (default: what it needs)",
    )  # fmt: skip
    device.add_argument(
        "--attention-backend",
        default="auto",
        metavar="B",
        help="tpu, gpu, gpu-mma (also -interpret), cpu, reference",
    )
    device.add_argument(
        "--memory-utilization", "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="share of the device's memory to use for everything",
    )  # fmt: skip
    device.add_argument(
        "--page-size", "--block-size", type=int, metavar="N",
        help="tokens of one K/V page (default: said at start)",
    )  # fmt: skip
    device.add_argument("--num-pages", "--num-gpu-blocks-override", type=int, metavar="N", help="K/V pages")
    device.add_argument("--compile-all-first", action="store_true", help="a CPU leaves no program for later, either")
    device.add_argument("--compile-cache", metavar="DIR", help="compiled programs are kept here; none: nowhere")
    device.add_argument("--export-cache", metavar="DIR", help="executables are kept here: starts without compiling")
