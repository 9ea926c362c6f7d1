"""The greedy token and the finiteness of a row: both forms against numpy, on logits of every kind."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampling.greedy import greedy_and_finite, in_one_pass, in_plain_passes
from tests.examples import examples

SHAPE = (4, 300)
FORMS = {"plain passes": jax.jit(in_plain_passes), "one pass": jax.jit(in_one_pass)}
# Few values: most rows have several tokens with the greatest one.
VALUES = [np.float32(x) for x in (-np.inf, -3e38, -1.5, -0.0, 0.0, 1e-40, 2.25, 2.2500002, 3e38)]
SPOILING = [np.float32(x) for x in (np.inf, -np.inf, np.nan, -np.nan)]


def expected(row: np.ndarray) -> tuple[int, bool]:
    """In float64, and by numpy's own order."""
    token = len(row) - 1 if np.isnan(row).any() else int(np.argmax(row.astype(np.float64)))
    return token, bool(np.isfinite(row).all())


@pytest.mark.parametrize("form", FORMS)
def test_the_first_of_the_greatest_and_whether_all_are_finite(form):
    @settings(max_examples=examples(60))
    @given(
        seed=st.integers(0, 1 << 30),
        spoilt=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 299), st.sampled_from(SPOILING)), max_size=3),
    )
    def check(seed, spoilt):
        rng = np.random.default_rng(seed)
        logits = np.asarray(VALUES, np.float32)[rng.integers(1, len(VALUES), SHAPE)]
        logits[0] = rng.standard_normal(SHAPE[1]).astype(np.float32)
        for row, token, value in spoilt:
            logits[row, token] = value
        tokens, is_finite = FORMS[form](logits)
        found = list(zip(np.asarray(tokens).tolist(), np.asarray(is_finite).tolist(), strict=True))
        with np.errstate(invalid="ignore"):
            assert found == [expected(row) for row in logits]

    check()


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_one_value(form, value):
    tokens, is_finite = FORMS[form](np.full(SHAPE, value, np.float32))
    assert np.asarray(tokens).tolist() == [SHAPE[1] - 1 if np.isnan(value) else 0] * SHAPE[0]
    assert not np.asarray(is_finite).any()


def test_a_cpu_takes_plain_passes_only():
    """The other form is no part of its program."""
    text = jax.jit(greedy_and_finite).lower(np.zeros(SHAPE, np.float32)).compile().as_text()
    assert text is not None
    assert "conditional" not in text
    assert text.count(" reduce(") == 3
