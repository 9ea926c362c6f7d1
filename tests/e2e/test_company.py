"""A text and its log-probabilities have the same bits alone and together, in one chunk and in several, over cached pages
and after preemption: the demo by the whole engine, compiled as for users, with the C code of CPUs.

Where tests compile quickly, XLA forms no vectors, and bits that depend on the number of rows would not show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.c_compiler import compiler
from tests.conftest import AS_FOR_USERS, COMPILED

DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantization": "int8", "num_scheduler_steps": 4},
        {"quantization": "int8", **DRAFTS},
    ],
    ids=["int8", "float32", "bfloat16", "several steps", "drafts"],
)
def test_company_changes_no_bit(settings):
    compiler()
    command = [sys.executable, "-m", "tests.e2e.company", str(COMPILED), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_FOR_USERS, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["together"] == found["alone"]
    assert found["cached"] == found["alone"]
    assert found["figures"]["hits"] > 0
    assert found["figures"]["preemptions"] > 0
