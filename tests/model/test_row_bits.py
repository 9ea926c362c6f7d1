"""A token's bits do not depend on the number of rows, from the embedding to its log-probability, where C computes what
is between the products. The programs are compiled as for users: where tests compile quickly, XLA forms no vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.c_compiler import compiler
from tests.conftest import AS_FOR_USERS


@pytest.mark.slow
def test_no_stage_has_bits_that_depend_on_the_number_of_rows():
    compiler()
    command = [sys.executable, "-m", "tests.model.row_bits"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | AS_FOR_USERS, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {of["form"]: of["differing"] for of in found} == {
        "float32": {}, "bfloat16": {}, "int8 weights": {}, "int8": {}, "int4 weights": {}, "int4": {},
    }  # fmt: skip
    assert {of["stages"] for of in found} == {18}
