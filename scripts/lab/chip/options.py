"""What a run of `scripts/check` was asked for. Every part's process gets it as JSON."""

from __future__ import annotations

import dataclasses
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from scripts.flags.settings import EngineSettings

DEFAULT_MODELS = ("llama-3.2-1b", "llama-3.1-8b")
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all parts."""

    device: str  # cpu, tpu or cuda
    rehearse: bool  # tiny shapes
    models: tuple[str, ...]  # presets, with random weights
    seed: int
    limit_s: float  # of all parts together

    @classmethod
    def make(cls, *, device: str, rehearse: bool, models: tuple[str, ...], seed: int | None, limit_s: float) -> Options:
        """The options, with what was not asked for."""
        return cls(
            device=device,
            rehearse=rehearse,
            models=models or (("demo",) if rehearse else DEFAULT_MODELS),
            seed=secrets.randbelow(1 << 30) if seed is None else seed,
            limit_s=limit_s,
        )

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"models": tuple(fields["models"])})

    def to_json(self) -> str:
        """The options as text."""
        return json.dumps(dataclasses.asdict(self))

    def settings(self, model: str, **fields: object) -> EngineSettings:
        """The settings of an engine over `model`, a preset or the demo."""
        if model == "demo":
            return EngineSettings(device=self.device, **fields)  # type: ignore[arg-type]
        return EngineSettings(model=f"preset:{model}", load_format="dummy", device=self.device, **fields)  # type: ignore[arg-type]
