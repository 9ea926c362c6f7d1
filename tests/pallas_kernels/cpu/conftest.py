"""The C code for this CPU's vectors, and for narrower ones."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import jax
import pytest

from pallas_kernels.cpu import attention, four_bit, library, per_token, products
from tests.c_compiler import NATIVE, compiler

# The vectors of other CPUs, on one that has them, too.
TARGETS = {"native": None, "avx2": "-march=haswell", "sse2": "-march=x86-64"}
CALLS = {
    attention: ["ATTEND"],
    products: ["MULTIPLY", "MULTIPLY_ROUNDED"],
    four_bit: ["MULTIPLY_FOUR_BIT"],
    per_token: ["NORM", "GATE", "ROTATE", "LOG_SUM_EXP", "TEMPER"],
}


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """Of the libraries for other CPUs."""
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module", params=TARGETS)
def target(request, folder) -> Iterator[str]:
    """The operations run on each kind of vectors."""
    option = TARGETS[request.param]
    compiler()
    library.load(NATIVE)
    if option is None:
        yield request.param
        return
    if platform.machine() != "x86_64":
        pytest.skip(f"{option} is for x86")
    path = folder / f"{request.param}.so"
    if not path.is_file():
        library.compile_library(compiler(), path, option)
    functions = ctypes.CDLL(str(path))
    with pytest.MonkeyPatch.context() as patch:
        for module, constant in ((module, constant) for module, constants in CALLS.items() for constant in constants):
            name = getattr(library, constant)
            jax.ffi.register_ffi_target(f"{name}_{request.param}", jax.ffi.pycapsule(functions[name]), platform="cpu")
            patch.setattr(module, constant, f"{name}_{request.param}")
        yield request.param
