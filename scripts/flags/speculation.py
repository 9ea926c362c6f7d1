"""`--speculative-config`: the JSON of speculative decoding, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from model.quantization.forms import FORM_NAMES
from scripts.flags.parsing import json_object, structure

FLAG = "--speculative-config"
EXAMPLE = """'{"method": "ngram", "num_speculative_tokens": 3}'"""
_NGRAM, _DRAFT_MODEL = "ngram", "draft_model"
_HEADS = ("eagle", "eagle3")
_METHODS = (_NGRAM, _DRAFT_MODEL, *_HEADS)
_NOT_HERE = {
    "medusa": "Medusa heads are not read",
    "mlp_speculator": "MLP speculators are not read",
    "mtp": "Llama 3 has no layers that predict several tokens",
    "deepseek_mtp": "Llama 3 has no layers that predict several tokens",
    "suffix": "suffix decoding looks in other requests' texts",
}
# The last tokens that are looked up, unless the JSON says so. Two tokens occur again by chance, but then the drafts are
# only rejected; more than four select the same places.
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4

_LookupLength = Annotated[int, msgspec.Meta(ge=1, le=32)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts from the request's own text, from a second model, or from a head on the model's hidden states. If only one
    of `prompt_lookup_max` and `prompt_lookup_min` is given, it is the value of both."""

    method: str
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=15)]
    model: str | None = None  # the draft model or the head; None: the demo's own draft model
    quantization: str | None = None  # of the draft model, like `--quantization`; None: its stored form
    prompt_lookup_max: _LookupLength | None = None
    prompt_lookup_min: _LookupLength | None = None

    @property
    def looks_up(self) -> bool:
        """Whether the drafts come from the request's own text; otherwise they come from a draft model or a head."""
        return self.method == _NGRAM

    @property
    def has_head(self) -> bool:
        return self.method in _HEADS

    @property
    def lookup(self) -> tuple[int, int]:
        """The least and the largest number of last tokens that are looked up."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            return _LOOKUP_MIN, _LOOKUP_MAX
        return least or most or 0, most or least or 0

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> SpeculativeConfig:
        """The settings of a JSON object, or of its text. Raises ValueError, with the flag's name, for anything else."""
        fields = json_object(FLAG, value, EXAMPLE)
        fields.pop("draft_tensor_parallel_size", None)  # of vLLM: a draft model is on the chips of the model
        named = str(fields.get("model") or "[").startswith("[")  # "[ngram]" was a name of a method
        method = fields.setdefault("method", None if named else _DRAFT_MODEL)  # as in vLLM
        there_are = ", ".join(f'"{known}"' for known in _METHODS)
        if isinstance(method, str) and method in _NOT_HERE:
            raise ValueError(f'{FLAG}: method "{method}" is not supported: {_NOT_HERE[method]}; there are {there_are}')
        if method not in _METHODS:
            said = "has no method" if method is None else f"has the unknown method {method!r}"
            raise ValueError(f"{FLAG} {said}; there are {there_are}, such as {EXAMPLE}")
        config = structure(FLAG, fields, cls)
        if not config.looks_up and {"prompt_lookup_max", "prompt_lookup_min"} & fields.keys():
            raise ValueError(
                f'{FLAG}: prompt_lookup_min and prompt_lookup_max are for "{_NGRAM}": nothing is looked up'
            )
        if config.looks_up and config.model is not None:
            raise ValueError(f'{FLAG}: "{_NGRAM}" has no model: "model" is for the other methods')
        if config.quantization is not None and config.method != _DRAFT_MODEL:
            raise ValueError(
                f'{FLAG}: "quantization" is for "{_DRAFT_MODEL}": '
                + ("a head's weights are not quantised" if config.has_head else f'"{_NGRAM}" has no weights')
            )
        if config.quantization not in (None, *FORM_NAMES):
            raise ValueError(
                f"{FLAG}: unknown quantization {config.quantization!r}; there are {', '.join(FORM_NAMES)}, and without "
                "it the weights stay as they are stored"
            )
        if config.has_head and config.model is None:
            raise ValueError(f'{FLAG}: add a "model", the folder of the {method} head')
        least, most = config.lookup
        if least > most:
            raise ValueError(f"{FLAG}: prompt_lookup_min {least} is more than prompt_lookup_max {most}")
        return config
