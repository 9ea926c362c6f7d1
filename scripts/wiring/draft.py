"""The draft model of `--speculative-config`: found, and checked against the model that verifies its drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model.loading.source import DEMO_FOLDER, Kind, ModelSource
from scripts.wiring.limits import LEAST_DRAFT_COST
from scripts.wiring.settings import EngineSettings
from scripts.wiring.speculation import FLAG
from scripts.wiring.weights import ChosenWeights, choose_weights

if TYPE_CHECKING:
    from model.config import LlamaConfig

DEMO_DRAFT = DEMO_FOLDER / "draft"


@dataclass(frozen=True, kw_only=True)
class ChosenDraft:
    """A draft model that is found and checked, but not loaded yet."""

    weights: ChosenWeights
    settings: EngineSettings  # with which it is placed on the chips


def choose_draft(
    settings: EngineSettings, model: ChosenWeights, platform: str, max_model_len: int
) -> ChosenDraft | None:
    """The draft model; None if drafts are not a model's. Its weights are kept in the model's type or in 8 bits, as they
    are stored, and its K/V in the type of the computation.

    Args:
        model: the model that verifies the drafts.

    Raises:
        ValueError: none is named, it cannot be used, or has other tokens than the model, or a shorter context.
    """
    if settings.speculation is None or not settings.speculation.has_draft_model:
        return None
    name = settings.speculation.model
    if name is None and model.source.kind is not Kind.DEMO:
        raise ValueError(f'{FLAG}: add a "model", the draft model: only the demo has one of its own')
    own = replace(
        settings,
        model=name or str(DEMO_DRAFT),
        speculative_config=None,
        dtype=model.dtype,
        load_format="dummy" if settings.load_format == "dummy" else "auto",
        quantization=None,
        kv_cache_dtype="auto",
    )
    try:
        draft = choose_weights(own, platform)
    except ValueError as error:
        raise ValueError(f"{FLAG}: the draft model: {error}") from error
    sizes = draft.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(f"{FLAG}: the draft model has {sizes[0]} tokens, and the model {sizes[1]}: they must be equal")
    _check_same_tokens(draft.source, model.source, sizes[0])
    trained = draft.config.max_position_embeddings
    if trained < max_model_len:
        raise ValueError(
            f"{FLAG}: the draft model was trained for {trained} tokens: --max-model-len {max_model_len} is more"
        )
    return ChosenDraft(weights=draft, settings=own)


def draft_cost(draft: LlamaConfig, model: LlamaConfig, platform: str) -> float:
    """The time of a pass of the draft model, in passes of the model: the share of the weights that are multiplied, or
    the platform's least."""
    return max(_num_multiplied(draft) / _num_multiplied(model), LEAST_DRAFT_COST[platform])


def _num_multiplied(config: LlamaConfig) -> int:
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    of_layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return config.num_layers * of_layer + config.vocab_size * config.hidden_size


def _check_same_tokens(draft: ModelSource, model: ModelSource, vocab_size: int) -> None:
    """Raises ValueError if a token has another text, or is special in one of the models only."""
    if draft.path is None or model.path is None:
        return  # a preset has no tokens
    from server.text.tokenizer import ByteLevelTokenizer

    own, expected = (ByteLevelTokenizer.from_folder(x.path, vocab_size=vocab_size) for x in (draft, model) if x.path)
    texts = zip(own.token_bytes, expected.token_bytes, strict=False)
    differing = [id for id, (a, b) in enumerate(texts) if a != b]
    if not differing and own.special_tokens != expected.special_tokens:
        differing = sorted(set(own.special_tokens.values()) ^ set(expected.special_tokens.values())) or [0]
    if differing or len(own.token_bytes) != len(expected.token_bytes):
        first = f", the first is {differing[0]}" if differing else ""
        raise ValueError(
            f"{FLAG}: the draft model has other tokens than the model ({len(differing)} differ{first}): "
            "its drafts would be of other texts"
        )
