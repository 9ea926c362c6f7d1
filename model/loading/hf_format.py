"""The Hugging Face form of a model: which tensors fill which parameter, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model.config import LlamaConfig
from model.families import Family, LayerTensor
from model.inputs.json_file import read_object
from model.inputs.paths import Place
from model.inputs.words import shown

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_TORCH_FILE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


MERGING = "merge the two (`merge_and_unload` of the package peft) and serve the result"  # an adapter and its model


@dataclass(frozen=True)
class Source:
    """One tensor of the checkpoint."""

    key: str
    is_kv: bool = False  # its rows are KV heads, which are repeated if there are more chips than heads


EMBEDDING = Source("model.embed_tokens.weight")
HEAD = Source("lm_head.weight")

# Parameter -> the tensors that fill it, joined along the rows. Both are [out, in].
_TOP: dict[str, tuple[Source, ...]] = {
    "embedding": (EMBEDDING,),
    "norm.scale": (Source("model.norm.weight"),),
    "head.kernel": (HEAD,),
}
# Constants that older exporters wrote among the weights, although the config has them. Also the scales of K/V
# (`kv_ranges`) and of inputs, which are read only where they are needed.
IGNORED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|.*\.(input_scale|input_global_scale|output_scale|activation_scale|[qkv]_scale|kv_scale|weight_shape)"
)


def is_adapter(folder: Place) -> bool:
    """Whether the folder holds changes to the weights of a model, such as LoRA's, and no weights of its own."""
    others = (path.name for path in folder.glob("*.safetensors") if path.name != ADAPTER_FILE)
    return (folder / ADAPTER_CONFIG).exists() and not any(others)


def adapter_fault(folder: Place) -> str:
    """The rest of an error message that begins with the name of an adapter's folder. ValueError if the adapter's config
    is damaged."""
    base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    return adapter_refusal(base, "FOLDER")


def adapter_refusal(base: object, kind: str) -> str:
    """The rest of an error message that begins with the name of an adapter: it was given as a model.

    Args:
        base: the name of the adapter's model, if it is a non-empty string.
        kind: "FOLDER" or "FILE".
    """
    of_base = f" of the model {shown(base)}" if isinstance(base, str) and base else ""
    return (
        f"is an adapter{of_base} and no model: serve its model with --enable-lora --lora-modules NAME={kind}, or "
        + MERGING
    )


def sources(path: str, family: Family) -> tuple[Source, ...]:
    """The tensors that fill the parameter at `path`, in the order in which they are joined.

    Args:
        path: such as "layers.3.mlp.down.kernel". For one tensor of a fused projection, it is
            "layers.3.attention.qkv.v_proj.kernel" (`network.linear.SplitLinear`).
    """
    if path in _TOP:
        return _TOP[path]
    _, layer, name = path.split(".", 2)
    tensors = family.parameters.get(name)
    if tensors is None:
        fused, part, _ = name.rsplit(".", 2)
        tensors = tuple(tensor for tensor in family.linears[fused] if tensor.short_name == part)
    return tuple(Source(f"model.layers.{layer}.{tensor.name}.weight", tensor.is_kv) for tensor in tensors)


def parameter_of(key: str, family: Family) -> str:
    """The path of the parameter that a tensor fills: the inverse of `sources`. Each tensor of a fused projection has a
    path of its own."""
    for path, (source,) in _TOP.items():
        if source.key == key:
            return path
    layer, tensor = in_layer(key, family)
    module, _, kind = tensor.parameter.rpartition(".")
    is_fused = len(family.parameters[tensor.parameter]) > 1
    return f"layers.{layer}.{module}.{f'{tensor.short_name}.' if is_fused else ''}{kind}"


def module_of(key: str, family: Family) -> str:
    """The path of the module of a layer that a tensor fills, alone or with others."""
    layer, tensor = in_layer(key, family)
    return f"layers.{layer}.{tensor.parameter.rpartition('.')[0]}"


def by_path[T](value_of: Callable[[str], T], config: LlamaConfig) -> Iterator[tuple[str, T]]:
    """The path of each projection, as in `MixedForms`, and the value for its tensors. If these have several values, the
    path of each tensor."""
    family = config.family
    for module in (f"layers.{layer}.{name}" for layer in range(config.num_layers) for name in family.linears):
        values = {source.key: value_of(source.key) for source in sources(f"{module}.kernel", family)}
        if len(set(values.values())) == 1:
            yield module, next(iter(values.values()))
            continue
        yield from ((parameter_of(key, family).removesuffix(".kernel"), value) for key, value in values.items())


def in_layer(key: str, family: Family) -> tuple[str, LayerTensor]:
    """The number of the layer that has a tensor, and the tensor's description."""
    _, _, layer, name = key.removesuffix(".weight").split(".", 3)
    return layer, next(tensor for tensor in family.tensors if tensor.name == name)


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The name and the shape of every tensor that a checkpoint of this config must hold."""
    embed, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING.key: (vocab, embed), "model.norm.weight": (embed,)}
    if not config.tie_word_embeddings:
        shapes[HEAD.key] = (vocab, embed)
    layer = layer_shapes(config)
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weights, by the names of their modules in the layer."""
    sizes = config.sizes
    return {tensor.name: tuple(sizes[size] for size in tensor.shape) for tensor in config.family.tensors}


def expected_kernels(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that a quantised checkpoint may quantise: the projections and the head."""
    kernels = {f"{module}.weight" for module in config.projections} | {HEAD.key}
    return {key: shape for key, shape in expected_shapes(config).items() if key in kernels}
