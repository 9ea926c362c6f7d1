"""The C code for Arm, with and without its dot products, run by an emulator: every call is a process of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.cpu import library
from pallas_kernels.self_test import SelfTest
from tests.pallas_kernels.cpu import sanitized

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"  # of Debian
TARGETS = {"neon": "-march=armv8-a", "dot": "-march=armv8.2-a+dotprod"}
TYPES = {"float32": 11, "bfloat16": 16, "float16": 10, "int8": 2, "uint8": 6, "int32": 4}  # of XLA's interface


@pytest.fixture(scope="module", params=TARGETS)
def program(request, tmp_path_factory) -> Path:
    """`called.c` with the C code, for Arm."""
    if missing := [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]:
        pytest.skip(f"there is no {' and no '.join(missing)}: Debian has {PACKAGES}")
    path = tmp_path_factory.mktemp("arm") / request.param
    handlers = " ".join(f"HANDLER({name})" for name in library.NAMES)
    sources = [Path(__file__).with_name("called.c"), *sorted(library.SOURCES.glob("*.c"))]
    options = [flag for flag in library.FLAGS if flag != "-shared"] + ["-static", TARGETS[request.param]]
    folders = [f"-I{folder}" for folder in (library.SOURCES, jax.ffi.include_dir())]
    command = [COMPILER, *options, f"-DHANDLERS={handlers}", *folders, *map(str, sources), "-lm", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(autouse=True)
def emulated(program, monkeypatch):
    """Custom calls run the program."""

    def call(
        name: str, results: Any, input_output_aliases: Mapping[int, int] | None = None
    ) -> Callable[..., tuple[jax.Array, ...]]:
        shapes, tree = jax.tree.flatten(results)
        arguments_of = {result: argument for argument, result in (input_output_aliases or {}).items()}

        def run(*arguments: jax.Array, **attributes: np.generic) -> Any:
            given = b"".join(np.resize(x, 8 // x.nbytes).tobytes() for x in attributes.values())
            run_it = partial(of_process, program, name, shapes, arguments_of, given)
            return jax.tree.unflatten(tree, jax.pure_callback(run_it, shapes, *arguments))

        return run

    jax.clear_caches()
    monkeypatch.setattr(jax.ffi, "ffi_call", call)
    monkeypatch.setattr(library, "load", lambda folder: None)
    yield
    jax.clear_caches()


def of_process(
    program: Path,
    name: str,
    shapes: list[jax.ShapeDtypeStruct],
    arguments_of: Mapping[int, int],
    attributes: bytes,
    *arguments: jax.Array,
) -> list[np.ndarray]:
    """What the handler of the name returns, of the shapes.

    Args:
        arguments_of: the argument whose memory a result has.
        attributes: 8 bytes each.
    """

    def numbers(*values: int) -> bytes:
        return np.array(values, np.int64).tobytes()

    def described(x: Any) -> bytes:
        return numbers(TYPES[str(x.dtype)], x.ndim, *x.shape, x.size * np.dtype(x.dtype).itemsize)

    message = numbers(len(arguments), len(shapes), len(attributes) // 8)
    message += b"".join(described(x) + np.asarray(x).tobytes() for x in arguments)
    message += b"".join(described(x) + numbers(arguments_of.get(i, -1)) for i, x in enumerate(shapes))
    done = subprocess.run([EMULATOR, program, name], input=message + attributes, capture_output=True, timeout=60)
    assert done.returncode == 0, f"{name}: {done.returncode} {done.stderr.decode()}"
    found, at = [], 0
    for like in shapes:
        found.append(np.frombuffer(done.stdout, like.dtype, like.size, at).reshape(like.shape))
        at += found[-1].nbytes
    assert at == len(done.stdout)
    return found


@pytest.mark.parametrize("name", sanitized.FAULTS)
def test_it_agrees_with_float64(name):
    assert sanitized.FAULTS[name]() is None


@pytest.mark.parametrize("kind", sanitized.KINDS)
def test_attention(kind):
    SelfTest(sanitized.attention(kind), pages_per_seq=44).run(sanitized.PROGRAMS)
