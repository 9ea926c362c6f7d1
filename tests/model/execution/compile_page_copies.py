"""Compiles the copies of pages for chips that are not here and prints what the compiler says, one JSON object for each
program.

Run in a process of its own: `python -m tests.model.execution.compile_page_copies v6e:2x2 int8 eagle`. The model is two
layers of Llama 3.1 8B. With an EAGLE head, all that can be in a page is.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from model.compiling.compiler_options import compiler_options
from model.eagle_config import EagleConfig, EagleForm
from model.execution.memory_plan import RunnerConfig
from model.execution.step_programs import StepPrograms
from model.network.sharding import abstract_head, abstract_model, make_mesh
from model.presets import preset
from pallas_kernels.spec import Backend
from scripts.building.attention_backend import paged_attention
from scripts.lab.accounts.targets import target_named
from tests.model.collectives import collectives

PAGE_SIZES, NUM_PAGES = {"tpu": 128, "gpu": 64}, 511


def main(name: str, kv_dtype: str, drafts: str | None = None) -> None:
    target = target_named(name)
    devices = target.devices()
    mesh, config = make_mesh(len(devices), devices), replace(preset("llama-3.1-8b"), num_layers=2)
    model = abstract_model(config, dtype=jnp.bfloat16, mesh=mesh)

    def attention(kv_dtype: str) -> Any:
        form = {"dtype": "bfloat16", "kv_dtype": kv_dtype, "page_size": PAGE_SIZES[target.platform]}
        return paged_attention(model.config, Backend(target.platform), mesh=mesh, **form)

    draft = None
    if drafts is not None:
        raw = config.to_hf() | {"num_hidden_layers": 1, "tie_word_embeddings": False}
        head = EagleConfig.from_hf(raw, EagleForm(drafts), model.config)
        draft = abstract_head(head, dtype=jnp.bfloat16, mesh=mesh), attention("bfloat16")
    limits = RunnerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, moves_pages=True)
    programs = StepPrograms(model, attention(kv_dtype), limits, NUM_PAGES, draft)
    copies = programs.page_copies
    assert copies is not None
    updates = programs.updates()
    for kind in ("read", "write"):
        for size in copies.sizes:
            program = updates[copies.name(kind, size)]
            form = updates[copies.name("write", size)].arguments[1]
            with target.compiling(mesh):
                compiled = program.as_read().lower().compile(compiler_options=compiler_options(target.platform))
            memory, text = compiled.memory_analysis(), compiled.as_text()
            assert memory is not None
            result = {
                "kind": kind,
                "size": size,
                "state_bytes": bytes_of(programs.state_like),
                "copy_bytes": bytes_of(form),
                "argument_bytes": memory.argument_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "alias_bytes": memory.alias_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
                "exchanges": len(collectives(text)),
            }
            print(json.dumps(result), flush=True)


def bytes_of(described: Any) -> int:
    """On one device."""
    leaves = jax.tree.leaves(described)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


if __name__ == "__main__":
    main(*sys.argv[1:])
