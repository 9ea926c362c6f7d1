"""What a trainer's sender does by itself; tests/e2e/test_weight_updates.py has it with a server."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from scripts.weight_sender import SendError, WeightSender, _pieces


def test_pieces_keep_the_order_and_are_as_large_as_they_may_be():
    arrays = {name: np.zeros(size, np.uint8) for name, size in zip("abcdef", (3, 4, 9, 1, 7, 0), strict=True)}
    pieces = [list(piece) for piece in _pieces(arrays, 8)]
    assert pieces == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert [list(piece) for piece in _pieces({"x": jnp.zeros(4, jnp.bfloat16)}, 8)] == [["x"]]
    assert list(_pieces({}, 8)) == []


def test_other_types_are_refused_before_the_server_hears_of_them():
    with WeightSender("http://127.0.0.1:9", "key") as sender:
        with pytest.raises(ValueError, match="float32, bfloat16, float16: a has int8"):
            sender.send({"a": np.zeros(1, np.int8), "b": np.zeros(1, np.float32)})
        with pytest.raises(SendError, match=r"/start_weight_update: the server at http://127.0.0.1:9 does not answer"):
            sender.send({"b": np.zeros(1, np.float32)})
