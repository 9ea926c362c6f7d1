"""Finds the EAGLE head of `--speculative-config`, and checks it against the model whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.eagle_config import EagleConfig, EagleForm
from model.loading.source import head_folder
from scripts.building.chosen_weights import ChosenWeights
from scripts.flags.settings import EngineSettings

if TYPE_CHECKING:
    from pathlib import Path

    from model.config import LlamaConfig
    from model.loading.eagle_head import StoredHead
    from model.network.eagle import EagleHead


@dataclass(frozen=True, kw_only=True)
class ChosenHead:
    """A head that is found and checked, but not loaded yet."""

    folder: Path
    stored: StoredHead | None  # None: its weights are random
    eagle: EagleConfig
    dtype: str  # the model's
    context_remark: str | None
    seed: int  # for random weights
    quantization: None = None
    rounding: None = None

    @property
    def config(self) -> LlamaConfig:
        return self.eagle.layer

    @property
    def has_embedding(self) -> bool:
        """Whether the head has its own embedding; otherwise it shares the model's."""
        if self.stored is None:
            return self.eagle.layer.hidden_size != self.eagle.model_width
        return self.stored.has_embedding

    def plan(self, form: Mapping[str, Any]) -> EagleHead:
        """The head in the form of a `ModelOnChips`, without weights."""
        from model.network.sharding import abstract_head

        return abstract_head(self.eagle, has_embedding=self.has_embedding, **_placement(form))

    def load(self, form: Mapping[str, Any]) -> EagleHead:
        """The head in the form of a `ModelOnChips`, with its weights."""
        from model.loading.eagle_head import random_head

        if self.stored is None:
            return random_head(self.eagle, seed=self.seed, has_embedding=self.has_embedding, **_placement(form))
        return self.stored.load(**_placement(form))

    def remarks(self) -> Iterator[str]:
        origin = "nowhere (random)" if self.stored is None else self.folder
        yield f"of an {self.eagle.form} head from {origin}, as {self.dtype} (the model's)"
        if self.has_embedding:
            yield "with an embedding of its own"
        if self.context_remark is not None:
            yield self.context_remark


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
        stored=None if is_random else _find(folder, config, model),
        eagle=config,
        dtype=model.dtype,
        context_remark=remark,
        seed=settings.seed or 0,
    )


def _find(folder: Path, config: EagleConfig, model: ChosenWeights) -> StoredHead:
    """The weights on disk. A copy of the model's embedding is not loaded."""
    from model.inputs.gguf import is_gguf
    from model.loading.checkpoint import open_checkpoint
    from model.loading.eagle_head import HeadFiles, StoredHead
    from model.loading.hf_format import EMBEDDING

    with HeadFiles(folder, config) as files:
        files.tokens()
        has_embedding, stored = files.has_embedding, model.stored
        if has_embedding and stored is not None and not stored.is_converted and not is_gguf(stored.path):
            with open_checkpoint(stored.path, stored.config) as of_model:
                has_embedding = not files.shares_embedding(of_model, EMBEDDING.key)
        if not has_embedding and config.layer.hidden_size != config.model_width:
            width = config.layer.hidden_size
            raise ValueError(f"{folder}: a head of width {width} cannot share the model's embedding, and has none")
        return StoredHead(folder=folder, config=config, dtypes=files.dtypes, has_embedding=has_embedding)


def _placement(form: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a `ModelOnChips.form` that apply to a head, which is not quantised."""
    return {name: form[name] for name in ("dtype", "mesh")}
