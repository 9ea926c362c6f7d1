"""Compiles the draws of a plain and of a speculative step for a TPU, and prints the bytes of their temporaries."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from model.execution import speculative_step, step
from model.execution.rows import StepRows
from model.network.sharding import make_mesh
from model.sampling.logprobs import LogprobsMode
from model.sampling.vocab_split import BY_VOCAB, REPLICATED, VocabSplit
from scripts.lab.accounts.targets import tpu_target

NUM_ROWS, NUM_DRAFTS, NUM_SLOTS, VOCAB_SIZE = 8, 3, 64, 128256
NUM_PLACES = NUM_ROWS * (1 + NUM_DRAFTS)
RESULTS = (REPLICATED, REPLICATED, BY_VOCAB)


def main() -> None:
    """The command."""
    devices = tpu_target(sys.argv[1]).devices()
    mesh = make_mesh(len(devices), devices)
    vocabulary = VocabSplit(VOCAB_SIZE, mesh)

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    rows = StepRows(
        slots=array(NUM_PLACES),
        state=array(NUM_PLACES, SlotLayout.width(64)),
        starts=array(NUM_PLACES + 1),
        past=array(NUM_PLACES),
        kv_lens=array(NUM_PLACES),
        emits=array(NUM_PLACES, dtype=jnp.bool_),
    )
    logits, history = array(NUM_PLACES, VOCAB_SIZE, dtype=jnp.float32), array(NUM_SLOTS, VOCAB_SIZE)
    arguments = (logits, history, array(NUM_SLOTS, num_mask_words(VOCAB_SIZE)), rows)

    draw = partial(step._draw, mode=LogprobsMode.RAW_LOGPROBS)

    def plain(*arguments: Any) -> Any:
        specs = (BY_VOCAB, BY_VOCAB, REPLICATED, REPLICATED)
        return vocabulary.run(draw, *arguments, in_specs=specs, out_specs=RESULTS)

    def after_drafts(*arguments: Any) -> Any:
        specs = (BY_VOCAB, BY_VOCAB, REPLICATED, REPLICATED, REPLICATED)
        return vocabulary.run(speculative_step.draw_after_drafts, *arguments, in_specs=specs, out_specs=RESULTS)

    drafts = array(NUM_ROWS, NUM_DRAFTS)
    programs = {"plain": (plain, arguments), "speculative": (after_drafts, (*arguments, drafts))}
    found = {}
    for name, (program, given) in programs.items():
        memory = jax.jit(program, donate_argnums=1).lower(*given).compile().memory_analysis()
        assert memory is not None
        found[name] = memory.temp_size_in_bytes
    print(json.dumps(found))


if __name__ == "__main__":
    main()
