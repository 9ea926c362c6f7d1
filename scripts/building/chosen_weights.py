"""Chooses the weights of an engine: their place, the type of the computation, and the form in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.loading.source import ModelSource, resolve
from scripts.building.choices import (
    chip_products,
    choose_dtype,
    choose_quantization,
    choose_rounding,
)
from scripts.building.end_tokens import EndToken, find_end_tokens
from scripts.flags.settings import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

    from model.config import LlamaConfig
    from model.loading.stored_weights import StoredWeights
    from model.network.llama import Llama
    from model.quantization.forms import Rounding, WeightForm


@dataclass(frozen=True, kw_only=True)
class ChosenWeights:
    """Weights that are found and checked, but not loaded yet."""

    source: ModelSource
    end_tokens: tuple[EndToken, ...]
    stored: StoredWeights | None  # None: they are random
    config: LlamaConfig  # the checkpoint's own
    dtype: str  # the dtype of the computation
    quantization: WeightForm | None  # the form of the projections and the head
    rounding: Rounding | None  # how the inputs of these are rounded
    dtype_reason: str
    quantization_remark: str | None
    rounding_remark: str | None
    seed: int  # for random weights

    def load(self, form: dict[str, Any]) -> Llama:
        """The model in the form of a `ModelOnChips`, with its weights."""
        if self.stored is not None:
            return self.stored.load(**form)
        from model.loading.weights import random_weights

        return random_weights(self.config, **form, seed=self.seed)

    def remarks(self) -> Iterator[str]:
        origin = "nowhere (random)" if self.stored is None else self.source.weights
        yield f"of weights from {origin}, as {self.dtype} ({self.dtype_reason})"
        yield from filter(None, (self.quantization_remark, self.rounding_remark, self.stored and self.stored.remark))


def choose_weights(settings: EngineSettings, platform: str, tokenizer: Path | None = None) -> ChosenWeights:
    """Finds the model's weights. Raises ValueError if there are none, or they cannot be used as the settings say.

    Args:
        tokenizer: the argument of `find_end_tokens`.
    """
    source = resolve(settings.model, weights=settings.load_format != "dummy")
    stored = _find(settings, source)
    config = source.config if stored is None else stored.config
    dtypes = () if stored is None else stored.dtypes
    dtype, reason = choose_dtype(settings.dtype, config.checkpoint_dtype, platform, dtypes)
    chip = chip_products(platform)
    quantization, remark = choose_quantization(settings.quantization, stored, config, **chip)
    rounding, rounding_remark = choose_rounding(quantization, stored, **chip)
    return ChosenWeights(
        source=source,
        end_tokens=find_end_tokens(source, tokenizer),
        stored=stored,
        config=config,
        dtype=dtype,
        quantization=quantization,
        rounding=rounding,
        dtype_reason=reason,
        quantization_remark=remark,
        rounding_remark=rounding_remark,
        seed=settings.seed or 0,
    )


def bits_of_a_weight(form: WeightForm | None, dtype: str) -> int:
    """The bits of a weight of the projections in `form`. With None the weights are stored in `dtype`."""
    if form is None:
        return 32 if dtype == "float32" else 16
    return form.bits


def _find(settings: EngineSettings, source: ModelSource) -> StoredWeights | None:
    if settings.load_format == "dummy":
        return None
    if source.weights is None:
        raise ValueError(f"--model {settings.model} has no weights: add --load-format dummy for random ones")
    from model.loading.stored_weights import find_weights

    return find_weights(source.weights, source.config, settings.load_format)
