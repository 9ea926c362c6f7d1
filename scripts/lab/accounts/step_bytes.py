"""The bytes that a chip reads in a decode step, counted from shapes."""

from __future__ import annotations

import math

from model.execution.memory_plan import weights_bytes
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention


def step_bytes(model: Llama, attention: PagedAttention, *, num_rows: int, context: int) -> dict[str, int]:
    """`weights_read` and `kv_read` of one chip, for `num_rows` rows of `context` tokens: all weights but the embedding,
    of which it looks up rows, unless the embedding is the head; and every page of the rows."""
    embedding = model.embedding.get_value()
    looked_up = math.prod(embedding.sharding.shard_shape(embedding.shape)) * embedding.dtype.itemsize
    num_pages = num_rows * -(-context // attention.spec.page_size)
    return {
        "weights_read": weights_bytes(model) - (0 if model.head is None else looked_up),
        "kv_read": num_pages * attention.page_bytes() * model.config.num_layers,
    }
