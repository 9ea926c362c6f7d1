"""Finds the draft model or head of `--speculative-config`, and checks it against the model that verifies its drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.inputs.gguf import is_gguf
from model.loading.checkpoint import open_checkpoint
from model.loading.eagle_head import HeadFiles, load_head, random_head
from model.loading.hf_format import EMBEDDING
from model.loading.source import DEMO_FOLDER, Kind, ModelSource, head_folder
from model.network.eagle import EagleHead
from model.network.sharding import abstract_head
from scripts.building.step_times import num_multiplied
from scripts.building.weights import ChosenWeights, bits_of_a_weight, choose_weights
from scripts.flags.settings import EngineSettings
from scripts.flags.speculation import FLAG
from server.text.tokenizer import ByteLevelTokenizer

DEMO_DRAFT = DEMO_FOLDER / "draft"
# The least time of a pass of a draft model or head, as the number of the model's weights that take as long. On a CPU
# its operations are small: the demo's draft model takes 0.05 ms for one row and 0.13 ms for four, a fifth to a third of
# the demo with its 3.1 million weights.
LEAST_DRAFT_WEIGHTS = {"cpu": 630_000, "gpu": 0, "tpu": 0}


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """A head that is found and checked, but not loaded yet."""

    folder: Path
    is_random: bool  # nothing is read from the folder
    has_embedding: bool  # of its own; otherwise it shares the model's
    eagle: EagleConfig
    dtype: str  # the model's
    context_remark: str | None
    seed: int  # for random weights
    quantization: None = None
    rounding: None = None

    @property
    def config(self) -> LlamaConfig:
        return self.eagle.layer

    def plan(self, form: Mapping[str, Any]) -> EagleHead:
        """The head in the form of a `ModelOnChips`, without weights."""
        return abstract_head(self.eagle, **self._form(form))

    def load(self, form: Mapping[str, Any]) -> EagleHead:
        """The head in the form of a `ModelOnChips`, with its weights."""
        if self.is_random:
            return random_head(self.eagle, seed=self.seed, **self._form(form))
        return load_head(self.folder, self.eagle, **self._form(form))

    def _form(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of a `ModelOnChips.form` that apply to a head, which is not quantised."""
        return {"dtype": form["dtype"], "mesh": form["mesh"], "has_embedding": self.has_embedding}

    def remarks(self) -> Iterator[str]:
        origin = "nowhere (random)" if self.is_random else self.folder
        yield f"of an {self.eagle.form} head from {origin}, as {self.dtype} (the model's)"
        if self.has_embedding:
            yield "with an embedding of its own"
        if self.context_remark is not None:
            yield self.context_remark


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


def choose_head(
    name: str, method: str, settings: EngineSettings, model: ChosenWeights, max_model_len: int
) -> ChosenHead:
    """The head in a folder or of a hub name.

    Args:
        name: the folder or the hub name.
        method: "eagle" or "eagle3".
        model: the model that verifies the drafts.

    Raises:
        ValueError: there is no head, its format is not supported, or it does not fit the model.
    """
    is_random = settings.load_format == "dummy"
    folder = head_folder(name, weights=not is_random)
    config = EagleConfig.from_file(folder, EagleForm(method), model.config)
    trained, remark = config.layer.max_position_embeddings, None
    if trained < max_model_len:
        remark = f"trained for {trained} tokens: fewer of its drafts may be right behind them"
    return ChosenHead(
        folder=folder,
        is_random=is_random,
        has_embedding=_needs_embedding(config) if is_random else _has_embedding(folder, config, model),
        eagle=config,
        dtype=model.dtype,
        context_remark=remark,
        seed=settings.seed or 0,
    )


def _needs_embedding(config: EagleConfig) -> bool:
    """Whether the head cannot share the model's embedding."""
    return config.layer.hidden_size != config.model_width


def _has_embedding(folder: Path, config: EagleConfig, model: ChosenWeights) -> bool:
    """Checks the weights in the folder. Returns whether the head has an embedding of its own. A copy of the model's is
    not loaded."""
    files = HeadFiles(folder, config)
    files.tokens()
    has_embedding, stored = files.has_embedding, model.stored
    if has_embedding and stored is not None and not stored.is_converted and not is_gguf(stored.path):
        has_embedding = not files.shares_embedding(open_checkpoint(stored.path, stored.config), EMBEDDING.key)
    if not has_embedding and _needs_embedding(config):
        width = config.layer.hidden_size
        raise ValueError(f"{folder}: a head of width {width} cannot share the model's embedding, and has none")
    return has_embedding


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


def _check_same_tokens(draft: ModelSource, model: ModelSource, vocab_size: int) -> None:
    """Raises ValueError if a token has another text, or is special in one of the models only."""
    if draft.path is None or model.path is None:
        return  # a preset has no tokens
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
