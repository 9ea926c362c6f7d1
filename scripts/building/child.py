"""Runs work that may crash or hang in a child process, with a time limit."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from model.inputs.words import described
from server.engine.child_process import end_with_parent, start_without_main

END_S = 10.0  # the wait for a killed process to end: a driver that hangs may hold it for ever
BLAS = "OPENBLAS_NUM_THREADS"  # numpy reads this variable when it is imported


class ChildError(RuntimeError):
    """The child process gave no result. The message says how it ended."""


def in_child[T](work: Callable[..., T], *arguments: Any, limit_s: float, numpy_threads: int | None = None) -> T:
    """Computes `work(*arguments)` in a new process, which has no JAX client at its start.

    Args:
        work: the function. It is pickled, as are its arguments and its result.
        limit_s: the seconds after which the process is killed.
        numpy_threads: the threads of the process's matrix products, unless the environment has the number; None: all
            cores. The threads spin while they wait for each other, so next to busy processes fewer are faster.

    Raises:
        ChildError: `work` raised, its process died, or it took more than `limit_s` seconds and was killed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(sender, work, arguments), name="child", daemon=True)
    start_without_main(process, {} if numpy_threads is None else {BLAS: str(numpy_threads)})
    sender.close()  # only the child has it now: its end is the end of the pipe
    try:
        if not receiver.poll(limit_s):
            raise ChildError(f"it did not end within {limit_s:g} s")
        result, problem = receiver.recv()
    except EOFError:
        process.join(END_S)
        raise ChildError(how_it_ended(process.exitcode)) from None
    finally:
        process.kill()
        process.join(END_S)
        receiver.close()
    if problem is not None:
        raise ChildError(problem)
    return result


def how_it_ended(code: int | None) -> str:
    """An exit code in words, with the signal's name for a negative one."""
    if code is not None and code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _main(sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    outcome: tuple[Any, str | None]
    try:
        outcome = work(*arguments), None
    except Exception as error:
        traceback.print_exc()
        outcome = None, described(error)
    sender.send(outcome)
