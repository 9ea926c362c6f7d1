"""Everything the HTTP side can be told. Built once by whoever starts the server; nothing here reads the environment."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_METRICS_PREFIX = "pallas_serve:"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What a request gets where it says nothing: the checkpoint's `generation_config.json`, or OpenAI's values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationDefaults:
        """Of the file's fields those above; `do_sample: false` means greedy. No file: the defaults above."""
        path = folder / "generation_config.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        values = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    tokenizer_folder: Path
    model_names: tuple[str, ...]  # the first is the one that answers carry; all are accepted
    model_root: str = ""  # where the weights came from, as /v1/models shows it
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # none: open to all
    allowed_origins: tuple[str, ...] = ("*",)
    chat_template: str | None = None  # replaces the tokenizer's own
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    metrics_prefix: str = DEFAULT_METRICS_PREFIX
    version: str = "0.0.0"
    force_usage: bool = False  # streams carry usage whether or not they ask for it
    show_cached_tokens: bool = True  # usage.prompt_tokens_details
    queue_timeout_s: float | None = None  # a request that waits longer is refused; None: it may wait for ever
    max_body_bytes: int = 8 * 2**20  # ids of a million tokens; the JSON of more would hold up every stream for long
    max_choices: int = 128  # sequences of one HTTP request: prompts times n
    grace_period_s: float = 30.0  # after SIGTERM, for what is running
    heartbeat_timeout_s: float = 60.0  # an engine silent for longer is reported as unhealthy
    death_linger_s: float = 3.0  # after the engine's death /health says 503 for so long, then the server exits

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError(f"the served model needs a name: {self.model_names=}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"no such port: {self.port=}")
        if not all(self.api_keys):
            raise ValueError("an API key is empty: everybody would have it")
        if self.queue_timeout_s is not None and not self.queue_timeout_s > 0:
            raise ValueError(f"a request must be allowed to wait for some time: {self.queue_timeout_s=}")
        for name in ("grace_period_s", "heartbeat_timeout_s", "death_linger_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is not negative: {getattr(self, name)}")
        if self.max_body_bytes < 1 or self.max_choices < 1:
            raise ValueError(f"limits are at least 1: {self.max_body_bytes=}, {self.max_choices=}")
