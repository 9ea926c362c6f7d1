"""Value checks of a ragged batch, by hand."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels import validate
from pallas_kernels.api import RaggedBatch

# Row 0 decodes its fifth token into page 3, row 1 brings tokens 2 and 3 of its first page, row 2 is padding.
BATCH = RaggedBatch(
    page_table=jnp.array([[2, 3, 0], [1, 0, 0], [0, 0, 0]]),
    kv_lens=jnp.array([5, 3, 0]),
    query_starts=jnp.array([0, 1, 3, 3]),
    num_decodes=jnp.int32(1),
    num_rows=jnp.int32(2),
)


def check(**changes: jnp.ndarray) -> None:
    validate.page_table(replace(BATCH, **changes), num_pages=4, page_size=4)


def test_a_right_batch_passes_and_rows_may_share_a_page_that_nobody_writes() -> None:
    check()
    check(page_table=jnp.array([[2, 3, 0], [2, 1, 0], [0, 0, 0]]), kv_lens=jnp.array([5, 6, 0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": jnp.array([[2, 4, 0], [1, 0, 0], [0, 0, 0]])}, r"out of range: row=0"),
        ({"page_table": jnp.array([[2, 3, 0], [0, 0, 0], [0, 0, 0]])}, r"out of range: row=1"),
        ({"page_table": jnp.array([[2, -1, 0], [1, 0, 0], [0, 0, 0]])}, r"out of range: row=0"),
        (
            {"page_table": jnp.array([[2, 3, 0], [3, 0, 0], [0, 0, 0]])},
            r"two rows write to one page: page=3 rows 0 and 1",
        ),
        ({"kv_lens": jnp.array([13, 3, 0])}, "longer than its page table"),
        ({"kv_lens": jnp.array([5, 1, 0])}, "last ones of its sequence"),
        ({"query_starts": jnp.array([0, 1, 0, 0])}, "last ones of its sequence"),
    ],
)
def test_what_a_device_would_get_silently_wrong_is_named(changes: dict[str, jnp.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(**changes)
