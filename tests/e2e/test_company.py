"""A text and its log-probabilities have the same bits alone and together, in one chunk and in several, over cached
pages, after preemption, with drafts and without: the demo by the whole engine, with the C code of CPUs.

The programs are compiled as for users. Where tests compile quickly, XLA forms no vectors, and bits that depend on the
number of rows would not show. Those of other forms are compared stage by stage (tests/model/row_bits.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.c_compiler import compiler
from tests.conftest import AS_FOR_USERS, COMPILED

pytestmark = pytest.mark.slow

INT8 = {"quantization": "int8"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@cache
def answers(settings: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.e2e.company", str(COMPILED), settings]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_FOR_USERS, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.e2e
@pytest.mark.parametrize("steps", [{}, {"speculative_config": DRAFTS}], ids=["int8", "drafts"])
def test_company_changes_no_bit(steps):
    compiler()
    found, expected = answers(json.dumps(INT8 | steps)), answers(json.dumps(INT8))["alone"]
    assert found["alone"] == expected
    assert found["together"] == expected
    assert found["cached"] == expected
    assert found["figures"]["hits"] > 0
    assert found["figures"]["preemptions"] > 0
