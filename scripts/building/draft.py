"""Finds the draft model or head of `--speculative-config`, and checks it against the model that verifies its drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.loading.source import DEMO_FOLDER, Kind, ModelSource
from scripts.building.chosen_weights import ChosenWeights, bits_of_a_weight, choose_weights
from scripts.building.head import ChosenHead, choose_head
from scripts.building.limits import LEAST_DRAFT_WEIGHTS
from scripts.flags.settings import EngineSettings
from scripts.flags.speculation import FLAG

DEMO_DRAFT = DEMO_FOLDER / "draft"


@dataclass(frozen=True, kw_only=True)
class ChosenDraft:
    """A draft model or head that is found and checked, but not loaded yet."""

    weights: ChosenWeights | ChosenHead
    settings: EngineSettings  # the settings by which it is placed on the chips

    @property
    def network(self) -> LlamaConfig | EagleConfig:
        """The config of the network, with the sizes of its weights."""
        return self.weights.eagle if isinstance(self.weights, ChosenHead) else self.weights.config

    def cost(self, model: ChosenWeights, platform: str) -> float:
        """The time of its pass, in passes of the model, with the weights of both in their stored forms."""
        bits = bits_of_a_weight(self.weights.quantization, self.weights.dtype)
        of_model = bits_of_a_weight(model.quantization, model.dtype)
        return draft_cost(self.network, model.config, platform, bits=(bits, of_model))


def choose_draft(
    settings: EngineSettings, model: ChosenWeights, platform: str, max_model_len: int
) -> ChosenDraft | None:
    """The draft model or head. None: drafts are looked up in the prompt and output.

    The weights of a draft model have the form that the config asks for, or else their stored form. The weights of a
    head have the model's type. K/V have the type of the computation.

    Args:
        model: the model that verifies the drafts.

    Raises:
        ValueError: the config names no draft model or head, it cannot be used, its tokens are not those of the model,
            or a draft model has a shorter context. A head's shorter context is only reported.
    """
    if settings.speculation is None or settings.speculation.looks_up:
        return None
    name = settings.speculation.model
    if settings.speculation.has_head:
        assert name is not None, "the config of a head names it"
        try:
            head = choose_head(name, settings.speculation.method, settings, model, max_model_len)
        except ValueError as error:
            raise ValueError(f"{FLAG}: {error}") from error
        own = replace(settings, speculative_config=None, quantization=None, kv_cache_dtype="auto")
        return ChosenDraft(weights=head, settings=own)
    if name is None and model.source.kind is not Kind.DEMO:
        raise ValueError(f'{FLAG}: add a "model", the draft model: only the demo has one of its own')
    own = replace(
        settings,
        model=name or str(DEMO_DRAFT),
        speculative_config=None,
        dtype=model.dtype,
        load_format="dummy" if settings.load_format == "dummy" else "auto",
        quantization=settings.speculation.quantization,
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


def draft_cost(
    draft: LlamaConfig | EagleConfig, model: LlamaConfig, platform: str, *, bits: tuple[int, int] = (16, 16)
) -> float:
    """The time of a pass of the draft model or head, in passes of the model. It is the ratio of the bytes of the
    multiplied weights, or the platform's minimum if that is larger.

    Args:
        bits: the bits of a weight of the draft model or head, and of a weight of the model.
    """
    weights = num_multiplied(draft) * bits[0] / bits[1]  # as many of the model's take as long to read
    return max(weights, LEAST_DRAFT_WEIGHTS[platform]) / num_multiplied(model)


def num_multiplied(network: LlamaConfig | EagleConfig) -> int:
    """The number of weights that a pass multiplies: all but the embedding."""
    config = network if isinstance(network, LlamaConfig) else network.layer
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    if isinstance(network, LlamaConfig):
        return config.num_layers * of_layer + config.vocab_size * config.hidden_size
    of_head = network.draft_vocab_size * config.hidden_size
    if network.form is EagleForm.EAGLE:
        return of_layer + of_head + 2 * config.hidden_size**2
    return of_layer + of_head + config.hidden_size * (queries + 2 * keys)  # the inputs of attention are twice as wide


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
