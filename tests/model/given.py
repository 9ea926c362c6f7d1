"""A whole model of a trainer's arrays."""

from __future__ import annotations

from typing import Any

from model.loading.given_tensors import GivenWeights
from model.loading.weights import fill
from model.network.llama import Llama
from model.network.sharding import abstract_model

FORM: dict[str, Any] = {"dtype": "float32", "mesh": None, "quantization": None, "rounding": None}


def loaded(given: GivenWeights, **form: Any) -> Llama:
    form = FORM | form
    made = dict(given.modules(form))
    return fill(abstract_model(given.config, **form), lambda module, _: made[module])
