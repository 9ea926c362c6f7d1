"""Chooses the attention backend of an engine: the first candidate whose kernels pass a self-test on this device.

A kernel that a compiler refuses, or that computes wrong numbers on this device, never serves a token: with
`--attention-backend auto` the next candidate is taken, with a warning; a backend asked for by name is an error. The
same holds for a CPU's C code where there is no compiler for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server.engine.wire import AttentionInfo

if TYPE_CHECKING:
    from batcher.buckets import BucketConfig
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.self_test import Program
    from pallas_kernels.spec import Backend

logger = logging.getLogger("pallas_serve")

TEST_TOKENS = 256  # of the mixed program, or fewer: enough for chunks of several tiles
LONG_S = 60.0
HANGS = "a kernel may hang on this device; --attention-backend reference does without it"
NOT_TESTED = "not needed: the reference is what kernels are compared with"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The attention of an engine, and what its start found out about it."""

    attention: PagedAttention
    info: AttentionInfo
    remarks: tuple[str, ...]  # for the report


def choose_attention(
    requested: str,
    candidates: Sequence[Backend],
    make: Callable[[Backend], PagedAttention],
    buckets: BucketConfig,
    *,
    platform: str,
    max_model_len: int,
    native_folder: Path | None,
    make_tested: Callable[[Backend], PagedAttention] | None = None,
) -> Chosen:
    """The attention of the first of `candidates` that can be used and passes its self-test.

    Args:
        requested: `--attention-backend`.
        make: the attention of the model over a backend. Its ValueErrors are raised.
        native_folder: where compiled C code is kept; None: it is compiled for this process alone.
        make_tested: the attention that is tested in its place; None: that of `make` itself.

    Raises:
        ValueError: none passes.
    """
    from pallas_kernels.self_test import SelfTestError
    from pallas_kernels.spec import UnavailableError

    failures: dict[str, str] = {}
    for backend in candidates:
        try:
            attention = make(backend)
            _load_native(backend, native_folder)
            tested = attention if make_tested is None else make_tested(backend)
            result, remark = _tested(tested, buckets, platform, max_model_len)
        except (SelfTestError, UnavailableError) as error:
            failed = "failed its self-test: " if isinstance(error, SelfTestError) else ""
            failures[str(backend)] = f"{failed}{error}"
            logger.warning("the attention backend %s cannot be used: %s", backend, failures[str(backend)])
            continue
        info = AttentionInfo(requested=requested, backend=str(backend), self_test=result, failures=failures)
        return Chosen(attention=attention, info=info, remarks=(*_warnings(failures, backend), remark))
    raise ValueError(f"--attention-backend {requested} cannot be used here: {_reasons(failures)}")


def self_test_programs(buckets: BucketConfig) -> list[Program]:
    """The shapes of the self-test: those of a mixed step of the engine, of its largest decode-only step, and of its
    largest speculative step if it has any."""
    from batcher.buckets import BucketLadder
    from batcher.step import Variant
    from pallas_kernels.self_test import Program

    ladder, tokens = BucketLadder(buckets), min(TEST_TOKENS, buckets.max_num_batched_tokens)
    rows = min(buckets.max_num_seqs, tokens - 1)
    mixed = ladder.choose(tokens, rows, decode_only=False, variant=Variant.SAMPLE)
    most = buckets.max_num_seqs
    programs = [Program(num_tokens=mixed.num_tokens, num_rows=mixed.num_rows), Program(num_tokens=most, num_rows=most)]
    if buckets.num_drafts:
        most, each = buckets.max_draft_rows, 1 + buckets.num_drafts
        programs.append(Program(num_tokens=most * each, num_rows=most, few_queries=True))
    return programs


def _tested(attention: PagedAttention, buckets: BucketConfig, platform: str, max_model_len: int) -> tuple[str, str]:
    """The result in a word, and a remark. Raises SelfTestError."""
    from model.compiling.compiler_options import compiler_options
    from pallas_kernels.self_test import LONGEST, LONGEST_ON_GPUS, SelfTest, SelfTestError
    from pallas_kernels.spec import Backend

    if attention.backend is Backend.REFERENCE and platform == "cpu":
        return NOT_TESTED, f"attention backend {attention.backend}: a test is {NOT_TESTED}"
    started = time.perf_counter()
    pages_per_seq = -(-max_model_len // attention.spec.page_size)
    longest = LONGEST_ON_GPUS if platform == "gpu" else LONGEST
    test = SelfTest(
        attention, pages_per_seq=pages_per_seq, longest=longest, compiler_options=compiler_options(platform)
    )
    if attention.backend is Backend.CPU:
        from pallas_kernels.cpu import products

        if fault := products.fault():
            raise SelfTestError(fault)
    with _warning_after(LONG_S, f"the self-test of the attention backend {attention.backend} takes long: {HANGS}"):
        passed = test.run(self_test_programs(buckets))
    seconds = time.perf_counter() - started
    return "passed", (
        f"attention backend {attention.backend} agrees with float32 within {passed.largest_error:.2%} in "
        f"{passed.num_steps} steps ({seconds:.1f} s)"
    )


@contextmanager
def _warning_after(seconds: float, message: str) -> Iterator[None]:
    """A kernel that hangs cannot be interrupted. The log then says what the start is waiting for."""
    timer = threading.Timer(seconds, logger.warning, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warnings(failures: dict[str, str], backend: Backend) -> tuple[str, ...]:
    if not failures:
        return ()
    return (f"WARNING: serving with the attention backend {backend}. Not used: {_reasons(failures)}",)


def _reasons(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())


def _load_native(backend: Backend, folder: Path | None) -> None:
    """Raises UnavailableError if the backend has code in C and that cannot be compiled."""
    from pallas_kernels.spec import Backend

    if backend is Backend.CPU:
        from pallas_kernels.cpu import library

        library.load(folder)
