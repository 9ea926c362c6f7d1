"""The steps of a preset on chips that are not here, as a runner describes them: what the accounts of steps compile."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from model.config import LlamaConfig
from model.network.llama import Llama
from model.network.sharding import TENSOR_AXIS, abstract_model
from model.presets import preset
from model.quantization.forms import Rounding, form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `model_of` reads."""
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--quantization", help="of the weights: int8, fp8, int4, int4-g64, int4-g128-zeros")
    parser.add_argument("--rounded-rows", type=int, help="products of so many rows or more round their inputs")
    parser.add_argument("--rounded-head", action="store_true", help="and so does the head")
    parser.add_argument("--layers", type=int, help="compile this many only")


def model_of(args: argparse.Namespace, mesh: Mesh) -> Llama:
    """The model that the flags describe, with abstract weights in bfloat16 or in the form that is asked for."""
    config = preset(args.preset)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    rounding = None
    if args.rounded_rows is not None:
        rounding = Rounding(min_rows=args.rounded_rows, with_head=args.rounded_head)
    form = form_named(args.quantization, config.projection_inputs) if args.quantization else None
    return abstract_model(config, dtype=jnp.bfloat16, mesh=mesh, quantization=form, rounding=rounding)


def attention_of(
    config: LlamaConfig, mesh: Mesh, backend: Backend, *, page_size: int, kv_dtype: Any = jnp.bfloat16
) -> PagedAttention:
    """The attention of a network.

    Args:
        config: the network's own, with the K/V heads that the mesh needs (`Llama.config`).
        page_size: in tokens.
    """
    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=jnp.bfloat16,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(spec, backend, mesh, TENSOR_AXIS)
