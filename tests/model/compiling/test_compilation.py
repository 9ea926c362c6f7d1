"""Programs compiled behind the caller's back: all of them, in order, or soon none any more."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import pytest

from model.compiling.compilation import Compilation


def lower(size: int) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((size,), jnp.int32))


def test_every_program_is_there_in_order():
    compilation = Compilation({size: lambda size=size: lower(size) for size in (5, 2, 9)}, {})
    programs = compilation.result()
    assert list(programs) == [5, 2, 9]
    assert programs[2](jnp.array([1, 2])).tolist() == [3, 6]
    assert compilation.tracing_s > 0


class Watched:
    """A lowered program that says when it is compiled."""

    def __init__(self, compiled: list[int], size: int) -> None:
        self._compiled, self._size = compiled, size

    def compile(self, **options: object) -> jax.stages.Compiled:
        self._compiled.append(self._size)
        return lower(self._size).compile(**options)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_programs_may_be_traced_first_and_compiled_when_they_are_asked_for(is_cancelled):
    compiled: list[int] = []
    programs = {size: lambda size=size: Watched(compiled, size) for size in range(1, 3 + (os.cpu_count() or 1))}
    compilation = Compilation(programs, {}, only_trace=True)
    waiting = compilation._traced.result()  # all are traced
    assert len(waiting) == len(programs)
    assert compiled == []
    if is_cancelled:
        compilation.cancel()
        assert compiled == []
    else:
        assert compilation.result()[2](jnp.array([1, 2])).tolist() == [3, 6]
        assert sorted(compiled) == list(programs)


def test_what_tracing_raises_is_raised():
    def refuse() -> jax.stages.Lowered:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        Compilation({"good": lambda: lower(3), "bad": refuse}, {}).result()


def test_after_cancelling_nothing_more_is_traced():
    tracing, go_on, traced = threading.Event(), threading.Event(), []

    def first() -> jax.stages.Lowered:
        tracing.set()
        go_on.wait()
        traced.append("first")
        return lower(4)

    compilation = Compilation({"first": first, "second": lambda: traced.append("second")}, {})
    tracing.wait()
    canceller = threading.Thread(target=compilation.cancel)
    canceller.start()
    while not compilation._cancelled.is_set():
        pass
    go_on.set()
    canceller.join()
    assert traced == ["first"]
