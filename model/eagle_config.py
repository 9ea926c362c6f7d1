"""The constants of an EAGLE head, from the `config.json` of its checkpoint. Heads with other computations are refused.

EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) are single layers that read the hidden states of a model and
predict its tokens. Their public checkpoints give the layer's sizes as a Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from model.config import LlamaConfig
from model.families import LLAMA
from model.inputs.json_file import read_object
from model.inputs.limits import MAX_VOCAB_SIZE
from model.inputs.schema import TRUTH, check, described_as, integer, unsupported
from model.inputs.words import shown

NUM_TAPS = 3  # hidden states of the model that an EAGLE-3 head reads


class EagleForm(StrEnum):
    """The generations of the heads, by the names of their methods in `--speculative-config`."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


# The names that trainers and servers give the same layer. Some checkpoints name the model's own architecture.
_ARCHITECTURES = {
    EagleForm.EAGLE: (LLAMA.architecture, "LlamaForCausalLMEagle", "EagleLlamaForCausalLM"),
    EagleForm.EAGLE3: (LLAMA.architecture, "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
}
# Fields that change what a head computes, and the only value that is computed here.
_EXPECTED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "logit_scale": 1,
    "qkv_bias": False,
    "bias": False,
    "add_para_norm": False,  # HASS
    "fc_norm": False,  # EAGLE-3.1, as are the next two
    "norm_before_fc": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "parallel_drafting": False,
}

_LayerIds = Annotated[tuple[Annotated[int, integer(0, 1 << 16)], ...], described_as("a list of numbers of layers")]


class _Taps(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: _LayerIds | None = None


class _HeadFile(_Taps, kw_only=True):
    """The fields of `config.json` besides those of a Llama."""

    draft_vocab_size: Annotated[int, integer(1, MAX_VOCAB_SIZE)] | None = None
    target_hidden_size: Annotated[int, integer(1, 1 << 24)] | None = None
    norm_before_residual: TRUTH | None = None


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shapes and constants of one head."""

    form: EagleForm
    layer: LlamaConfig  # the config of a Llama of one layer; its vocabulary is the model's
    model_width: int  # width of the model's hidden states, which the head reads
    draft_vocab_size: int  # tokens that the head can draft
    taps: tuple[int, ...]  # layers whose inputs the head reads (`Llama.run`); (): it reads the states after the norm
    norms_residual: bool = False  # the residual stream of the layer begins with the normed states

    @classmethod
    def from_file(cls, folder: Path, form: EagleForm, model: LlamaConfig) -> EagleConfig:
        """Reads `config.json` in the folder of a head. Raises ValueError as `from_hf` does."""
        path = folder / "config.json"
        if not path.exists():
            raise ValueError(f"there is no {path}: a head is a folder with its config.json and weights")
        try:
            return cls.from_hf(read_object(path), form, model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], form: EagleForm, model: LlamaConfig) -> EagleConfig:
        """Translates the parsed `config.json`.

        Args:
            model: the config of the model for which the head drafts.

        Raises:
            ValueError: one message lists every setting that is not computed here, and every size that is not the
                model's.
        """
        file, problems = check(raw, _HeadFile)
        nested = raw.get("eagle_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"eagle_config={shown(nested)} is not an object")
        problems += _unsupported(raw, nested, form)
        llama = LlamaConfig.from_hf({**raw, "architectures": [LLAMA.architecture], "model_type": LLAMA.model_type})
        if file is None or problems:
            raise ValueError(f"not an {form} head that is read here: " + "; ".join(problems))
        draft_vocab_size = file.draft_vocab_size or llama.vocab_size
        taps, problems = _taps(file, nested, model.num_layers) if form is EagleForm.EAGLE3 else ((), [])
        problems += _misfits(llama, file, form, model, draft_vocab_size)
        if problems:
            raise ValueError(f"the {form} head does not fit the model: " + "; ".join(problems))
        return cls(
            form=form,
            layer=llama,
            model_width=model.hidden_size,
            draft_vocab_size=draft_vocab_size,
            taps=taps,
            norms_residual=file.norm_before_residual or False,
        )


def _unsupported(raw: Mapping[str, Any], nested: Mapping[str, Any], form: EagleForm) -> list[str]:
    problems = []
    architectures = raw.get("architectures") or [LLAMA.architecture]
    names = _ARCHITECTURES[form]
    if len(architectures) != 1 or architectures[0] not in names:
        problems.append(f"architectures={shown(architectures)} is not supported (only {' or '.join(names)})")
    expected = {key: (None, value) for key, value in _EXPECTED.items()}
    return problems + unsupported(raw, expected) + unsupported(nested, expected, "eagle_config.")


def _misfits(
    llama: LlamaConfig, file: _HeadFile, form: EagleForm, model: LlamaConfig, draft_vocab_size: int
) -> list[str]:
    """The sizes that differ from the model's."""
    problems = []
    if llama.vocab_size != model.vocab_size:
        problems.append(f"it has {llama.vocab_size} tokens, and the model {model.vocab_size}")
    width = file.target_hidden_size or llama.hidden_size
    if width != model.hidden_size:
        problems.append(f"it reads hidden states of width {width}, and the model's are {model.hidden_size} wide")
    if form is EagleForm.EAGLE and llama.hidden_size != model.hidden_size:
        problems.append(f"its hidden_size {llama.hidden_size} must be the model's, whose head it shares")
    if draft_vocab_size > llama.vocab_size:
        problems.append(f"draft_vocab_size {draft_vocab_size} is more than its {llama.vocab_size} tokens")
    if form is EagleForm.EAGLE and draft_vocab_size != llama.vocab_size:
        problems.append("draft_vocab_size is of EAGLE-3 heads: take the method eagle3")
    return problems


def _taps(file: _HeadFile, nested: Mapping[str, Any], num_layers: int) -> tuple[tuple[int, ...], list[str]]:
    """The layers whose inputs are read, and what is wrong with them.

    Ids on the top level count as vLLM counts them: the input of that layer. Ids in `eagle_config` count as SGLang
    counts them: the output of that layer. Converted checkpoints confuse the two; in either count, the ids of the usual
    layers mean these.
    """
    usual = (2, num_layers // 2, num_layers - 3)
    fields, problems = check(nested, _Taps)
    if fields is None:
        return (), [f"eagle_config.{problem}" for problem in problems]
    top, inner = file.eagle_aux_hidden_state_layer_ids, fields.eagle_aux_hidden_state_layer_ids
    given = top or inner
    after = tuple(id + 1 for id in given or ())
    taps = usual if given is None or usual in (given, after) else given if top else after
    if len(taps) != NUM_TAPS:
        problems.append(f"eagle_aux_hidden_state_layer_ids={shown(given)} must name {NUM_TAPS} layers")
    if not all(0 <= tap <= num_layers for tap in taps):  # the last one is the output of the last layer
        problems.append(f"it reads the inputs of the layers {taps}, and the model has {num_layers}")
    return taps, problems
