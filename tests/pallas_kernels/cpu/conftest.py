"""The C code for this CPU's vectors, and for narrower ones."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu import attention, four_bit, library, per_token, products
from tests.c_compiler import NATIVE, compiler

# The vectors of other CPUs, on one that has them, too, and how a compiler tunes code for them. For a Zen 3, GCC does
# not fuse the products and sums of a chain by itself.
TARGETS = {
    "native": (),  # as `library.load` compiles
    "avx2": ("-march=haswell", "-mtune=znver3"),
    "sse2": ("-march=x86-64",),
    "x86-64-v4": ("-march=x86-64-v4", "-mtune=znver3"),
}
BY_DEFAULT = ("native", "avx2", "sse2")
CALLS = {
    attention: ["ATTEND"],
    products: ["MULTIPLY", "MULTIPLY_ROUNDED"],
    four_bit: ["MULTIPLY_FOUR_BIT"],
    per_token: ["NORM", "GATE", "ROTATE", "LOG_SUM_EXP", "TEMPER"],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in TARGETS],
)
def target(request) -> Iterator[str]:
    """The operations run on each kind of vectors."""
    compiler()
    library.load(NATIVE)
    if request.param == "native":
        yield request.param
        return
    if platform.machine() != "x86_64":
        pytest.skip(f"{request.param} is for x86")
    if "v4" in request.param and "avx512vl" not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"{request.param}: this CPU has no AVX-512")
    # Each takes a core a quarter of a minute: all files, processes and runs share them.
    path = NATIVE / "other_cpus" / f"{library._digest(compiler())}.{request.param}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        library.compile_library(compiler(), path, *TARGETS[request.param])
    functions = ctypes.CDLL(str(path))
    with pytest.MonkeyPatch.context() as patch:
        for module, constant in ((module, constant) for module, constants in CALLS.items() for constant in constants):
            name = getattr(library, constant)
            jax.ffi.register_ffi_target(f"{name}_{request.param}", jax.ffi.pycapsule(functions[name]), platform="cpu")
            patch.setattr(module, constant, f"{name}_{request.param}")
        yield request.param
