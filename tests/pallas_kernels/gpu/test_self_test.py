"""The self-test finds faults of the GPU kernels by their numbers alone, as it must on a chip."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.api import PagedAttention
from pallas_kernels.self_test import Program, SelfTest, SelfTestError
from pallas_kernels.spec import Backend
from tests.pallas_kernels.gpu.faults import FAULTS, SPEC

PROGRAMS = [Program(num_tokens=32, num_rows=2), Program(num_tokens=2, num_rows=2)]


def outcome(backend: Backend, kv_dtype: str = "bfloat16") -> str:
    jax.clear_caches()  # a fault is patched in while the kernels are traced
    spec = replace(SPEC, kv_dtype=jnp.dtype(kv_dtype))
    try:
        SelfTest(PagedAttention(spec, backend), pages_per_seq=3, num_sequences=2).run(PROGRAMS)
    except SelfTestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("backend", "kv_dtype"),
    [
        (Backend.GPU_INTERPRET, "bfloat16"),
        (Backend.GPU_INTERPRET, "float8_e4m3fn"),
        (Backend.GPU_MMA_INTERPRET, "bfloat16"),
    ],
)
def test_both_forms_pass(backend, kv_dtype):
    assert outcome(backend, kv_dtype) == ""


@pytest.mark.parametrize(
    ("backend", "fault", "message"),
    [
        (Backend.GPU_INTERPRET, "wrong block", "a single token over"),
        (Backend.GPU_INTERPRET, "no mask", "mixed step of 32 tokens in 2 rows: a chunk of"),
        (Backend.GPU_MMA_INTERPRET, "wrong queries", "mixed step of 32 tokens in 2 rows: a chunk of"),
    ],
)
def test_a_fault_is_found(backend, fault, message):
    patches = [mock.patch.object(owner, name, new) for (owner, name), new in FAULTS[fault].patches.items()]
    try:
        for patch in patches:
            patch.start()
        assert message in outcome(backend)
    finally:
        mock.patch.stopall()
        jax.clear_caches()
