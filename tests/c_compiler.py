"""The C code of CPUs in tests. Where there is no compiler, the engine does without it, and its tests skip."""

from __future__ import annotations

import pytest

from pallas_kernels.cpu import library
from pallas_kernels.errors import UnavailableError
from tests.conftest import COMPILED

NATIVE = COMPILED / "native"  # where an engine that keeps its programs in COMPILED has its library


def compiler() -> str:
    """The path of the C compiler, or a skip of the test or file that asks for it."""
    try:
        return library.find_compiler()
    except UnavailableError as error:
        pytest.skip(f"the C code needs a compiler: {error}", allow_module_level=True)
