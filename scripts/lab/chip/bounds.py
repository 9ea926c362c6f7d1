"""The least time that a chip can take for a step: its bytes at the memory's speed, or its products at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import LlamaConfig

VALUE_BYTES = 2  # of a weight and of a K/V value: bfloat16


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step must read and multiply. Activations, norms and sampling are left out: it is a lower bound."""

    num_bytes: int
    flops: int

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds at these speeds."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def work_of_step(config: LlamaConfig, *, num_tokens: int, num_rows: int, context: int) -> Work:
    """A step of `num_rows` rows with `num_tokens / num_rows` tokens each, after `context` tokens in pages."""
    embed, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = embed * head_dim * (2 * heads + 2 * kv_heads) + 3 * embed * config.intermediate_size
    head = embed * config.vocab_size
    per_row = num_tokens // num_rows
    seen = per_row * context + per_row * (per_row + 1) // 2  # pairs of a query and a key, of one row
    kv_bytes = num_rows * (context + per_row) * 2 * kv_heads * head_dim * VALUE_BYTES
    return Work(
        num_bytes=(config.num_layers * layer + head) * VALUE_BYTES + config.num_layers * kv_bytes,
        flops=2 * config.num_layers * layer * num_tokens
        + 2 * head * num_rows
        + 4 * config.num_layers * num_rows * seen * heads * head_dim,
    )
