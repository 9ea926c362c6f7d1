"""The families of decoders: the settings, the tensors and the layer of each.

A family that is added needs a `Family` in a file of its own, and a line in `FAMILIES`. Loading, sharding, quantisation,
adapters and the steps read this table. Configs use this module, so it imports no jax.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that every layer of a checkpoint has. The names are those of its module within a layer."""

    parameter: str  # the parameter of `Family.layer` that it fills
    name: str  # in Hugging Face's form
    shape: tuple[str, ...]  # the names of its sizes in `LlamaConfig.sizes`
    gguf: str = ""  # in llama.cpp's form; "": the family cannot be read in this form
    tunix: str = ""  # the array of the trainer Tunix; "": the same
    maxtext: str = ""  # the array of the trainer MaxText; "": the same
    has_pairs: bool = False  # GGUF and MaxText store the pairs that are rotated next to each other

    @property
    def is_kv(self) -> bool:
        """Whether its rows are KV heads, which are repeated if there are more chips than heads."""
        return self.shape[0] == "keys"

    @property
    def short_name(self) -> str:
        """The last part of its name, such as "v_proj". Adapters and parts of fused projections have this name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of decoders.

    Args:
        model_type, architecture: its names in `config.json`.
        gguf: its `general.architecture` in GGUF files; None: GGUF files of the family are not read.
        settings: fields of `config.json` that change what is computed, each with the values that are computed here.
        tensors: the tensors of a layer. Those with the same parameter are joined along the rows, in this order.
        layer: the class of a layer, as "package.module:Class". It is imported when a model is made.
    """

    model_type: str
    architecture: str
    gguf: str | None = None
    settings: Mapping[str, tuple[Any, ...]]
    tensors: tuple[LayerTensor, ...]
    layer: str

    @cached_property
    def parameters(self) -> Mapping[str, tuple[LayerTensor, ...]]:
        """The parameters of a layer, such as "mlp.down.kernel", each with its tensors."""
        names = dict.fromkeys(tensor.parameter for tensor in self.tensors)
        return {name: tuple(tensor for tensor in self.tensors if tensor.parameter == name) for name in names}

    @cached_property
    def linears(self) -> Mapping[str, tuple[LayerTensor, ...]]:
        """The products of a layer, such as "mlp.gate_up", each with the tensors that it fuses."""
        kernels = {name: parts for name, parts in self.parameters.items() if name.endswith(".kernel")}
        return {name.removesuffix(".kernel"): parts for name, parts in kernels.items()}

    def layer_type(self) -> type[Any]:
        """The class of a layer. It takes (config, linear, dtype=, num_shards=), as `DecoderLayer` does."""
        found: type[Any] = pkgutil.resolve_name(self.layer)
        return found

    def projections(self, num_layers: int) -> tuple[str, ...]:
        """The checkpoint's names of the modules with a weight matrix, without the head and the embedding."""
        names = [tensor.name for parts in self.linears.values() for tensor in parts]
        return tuple(f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in names)


_LLAMA_TENSORS = (
    LayerTensor("attention_norm.scale", "input_layernorm", ("embed",), gguf="attn_norm",
                tunix="input_layernorm.w", maxtext="pre_self_attention_layer_norm.scale"),
    LayerTensor("attention.qkv.kernel", "self_attn.q_proj", ("queries", "embed"), gguf="attn_q",
                tunix="attn.q_proj.w", maxtext="self_attention.query.kernel", has_pairs=True),
    LayerTensor("attention.qkv.kernel", "self_attn.k_proj", ("keys", "embed"), gguf="attn_k",
                tunix="attn.k_proj.w", maxtext="self_attention.key.kernel", has_pairs=True),
    LayerTensor("attention.qkv.kernel", "self_attn.v_proj", ("keys", "embed"), gguf="attn_v",
                tunix="attn.v_proj.w", maxtext="self_attention.value.kernel"),
    LayerTensor("attention.out.kernel", "self_attn.o_proj", ("embed", "queries"), gguf="attn_output",
                tunix="attn.o_proj.w", maxtext="self_attention.out.kernel"),
    LayerTensor("mlp_norm.scale", "post_attention_layernorm", ("embed",), gguf="ffn_norm",
                tunix="post_attention_layernorm.w", maxtext="post_self_attention_layer_norm.scale"),
    LayerTensor("mlp.gate_up.kernel", "mlp.gate_proj", ("mlp", "embed"), gguf="ffn_gate",
                tunix="mlp.gate_proj.kernel", maxtext="mlp.wi_0.kernel"),
    LayerTensor("mlp.gate_up.kernel", "mlp.up_proj", ("mlp", "embed"), gguf="ffn_up",
                tunix="mlp.up_proj.kernel", maxtext="mlp.wi_1.kernel"),
    LayerTensor("mlp.down.kernel", "mlp.down_proj", ("embed", "mlp"), gguf="ffn_down",
                tunix="mlp.down_proj.kernel", maxtext="mlp.wo.kernel"),
)  # fmt: skip
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    gguf="llama",
    settings={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
        "partial_rotary_factor": (1, 1.0),
    },
    tensors=_LLAMA_TENSORS,
    layer="model.network.layers:DecoderLayer",
)

FAMILIES: dict[str, Family] = {LLAMA.model_type: LLAMA}
