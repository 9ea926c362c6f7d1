"""Chooses the attention backend of an engine: the first candidate whose kernels pass a self-test on this device.

A kernel that a compiler refuses, or that computes wrong numbers on this device, never serves a token. With
`--attention-backend auto` the next candidate is chosen, with a warning. For a backend that was asked for by name it is
an error. The same applies to kernels that do not support this chip, dtype, head size or page size, and to the C code of
a CPU without a compiler.

The process that runs a test depends on the effect of a failure. Every test has a time limit.

- GPUs: after an illegal address all later work of a process fails, and a kernel that hangs cannot be interrupted. So a
  backend that another candidate could replace is tested in a child process. The child uses the GPU at the same time as
  this process, with memory that is not in this process's pool. It shares the compile cache, so after the first start
  the test costs an import of jax and a CUDA context. This process runs the test itself if a second process cannot use
  the GPU (compute mode EXCLUSIVE_PROCESS, or no memory outside the pool), or if this process is daemonic and may not
  have children.
- TPUs: only one process can hold the chip. A child would have to initialise it at every start before this process
  initialises it again. So this process runs the test. A hang ends the start with an error.
- `reference`, a backend asked for by name, and interpreted kernels: there is no replacement, so this process runs the
  test. A hang ends the start with an error, except that interpreted kernels have no time limit.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

from batcher.buckets import BucketConfig, BucketLadder
from batcher.step import Variant
from model.compiling.compiler_options import compiler_options
from model.config import LlamaConfig
from model.inputs.paths import Place
from model.network.sharding import make_mesh
from pallas_kernels.api import PagedAttention, candidates
from pallas_kernels.cpu import four_bit, library, per_token, products
from pallas_kernels.errors import UnavailableError
from pallas_kernels.self_test import LONGEST, LONGEST_ON_GPUS, Program, SelfTest, SelfTestError
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.building.child import ChildError, in_child
from scripts.building.device import KeptFolders, start_jax
from scripts.building.kept_verdict import KeptVerdict
from scripts.flags.settings import EngineSettings
from server.engine.wire import AttentionInfo

logger = logging.getLogger("pallas_serve")

TEST_TOKENS = 256  # the most tokens of the mixed program: enough for chunks of several tiles
TEST_TOKENS_OF_GPUS = 2048  # on GPUs: enough for several tiles on every multiprocessor, one after the other
NUMPY_THREADS = 2  # for a test in a child, because other processes trace programs at the same time
LONG_S = 60.0
LIMIT_S = 300.0  # the time limit of a test: ten times the first compilation of a backend on one core
HANGS = "a kernel may hang on this device; --attention-backend reference does without it"
FAILED = "failed its self-test: "
TO_REPORT = "A failed self-test is a fault of this program or of the device: please report it, with this line"
NOT_TESTED = "not needed: the reference is what kernels are compared with"
PASSED, PASSED_BEFORE, NEVER = "passed", "passed (kept)", "not run: --self-test never"
FORBIDDEN = "--self-test never; wrong numbers would be served"
NOT_HERE = "not run: the chip is not here"


def paged_attention(
    config: LlamaConfig,
    backend: Backend,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    mesh: Any,  # a Mesh; an AbstractMesh is enough for a plan; None for one chip
) -> PagedAttention:
    """The attention of a model in its stored form: `config` has the repeated KV heads (`sharding.stored_config`)."""
    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(spec, backend, mesh)


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The attention backends that a start may choose from."""

    candidates: Callable[[str, str], tuple[Backend, ...]] = candidates  # from --attention-backend and the platform
    make: Callable[..., PagedAttention] = paged_attention


BACKENDS = Backends()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The attention of an engine, and the results of its self-tests."""

    attention: PagedAttention
    info: AttentionInfo
    remarks: tuple[str, ...]  # for the report


def choose_attention(
    settings: EngineSettings,
    candidates: Sequence[Backend],
    make: Callable[[Backend], PagedAttention],
    buckets: BucketConfig,
    *,
    platform: str,
    max_model_len: int,
    folders: KeptFolders,
    make_tested: Callable[[Backend], PagedAttention] | None = None,
    limit_s: float = LIMIT_S,
    is_here: bool = True,
    needs_four_bit: bool = False,
) -> Chosen:
    """The attention of the first of `candidates` that can be used and passes its self-test.

    Args:
        make: returns the attention of the model over a backend. Its ValueErrors are raised.
        folders: where compiled C code and the verdicts of self-tests are kept.
        make_tested: returns the attention that is tested in place of that of `make`; None: `make` is used.
        limit_s: the seconds that a test may take.
        is_here: whether the device can run a test; otherwise every test passes.
        needs_four_bit: whether weights have 4 or 6 bits, which C code of its own multiplies on CPUs.

    Raises:
        ValueError: no candidate passes, or the compiler of the C code takes too long.
    """
    requested, failures = settings.attention_backend, dict[str, str]()
    for backend in candidates:
        try:
            attention = make(backend)
            if backend is Backend.CPU:
                library.load(folders.native, four_bit=needs_four_bit)
            test = _Test(
                attention=attention if make_tested is None else make_tested(backend),
                settings=settings,
                buckets=buckets,
                platform=platform,
                max_model_len=max_model_len,
            )
            result, remark = NOT_HERE, f"attention backend {backend}, without a test: the chip is not here"
            if is_here:
                may_fail = backend is not candidates[-1]
                result, remark = test.of_kernels(limit_s, folders.programs, may_fail=may_fail)
        except (SelfTestError, UnavailableError) as error:
            failed = FAILED if isinstance(error, SelfTestError) else ""
            failures[str(backend)] = f"{failed}{error}"
            logger.warning("the attention backend %s cannot be used: %s", backend, failures[str(backend)])
            continue
        info = AttentionInfo(requested=requested, backend=str(backend), self_test=result, failures=failures)
        warnings = (_warning(info, candidates[0]),) if failures else ()
        return Chosen(attention=attention, info=info, remarks=(*warnings, remark))
    raise ValueError(none_can_be_used(requested, failures))


def none_can_be_used(requested: str, failures: Mapping[str, str]) -> str:
    """The message of a start without an attention backend. `failures` are the reasons, by backend."""
    instead = "" if requested == "auto" else "; --attention-backend auto chooses one that can"
    return f"--attention-backend {requested} cannot be used here: {_reasons(failures)}{instead}"


def can_a_child_test(backend: Backend, *, may_fail: bool) -> bool:
    """Whether a second process can test the backend. This requires that another backend could replace it."""
    may_have_children = not multiprocessing.current_process().daemon
    return may_fail and may_have_children and backend in (Backend.GPU, Backend.GPU_MMA)


def compile_self_test(
    settings: EngineSettings,
    attention: PagedAttention,
    buckets: BucketConfig,
    *,
    platform: str,
    max_model_len: int,
) -> int:
    """Compiles the programs of the self-test and returns their number. The devices need not be attached.

    Raises SelfTestError if a program cannot be compiled.
    """
    if attention.backend is Backend.REFERENCE and platform == "cpu":
        return 0
    test = _Test(
        attention=attention, settings=settings, buckets=buckets, platform=platform, max_model_len=max_model_len
    )
    programs = self_test_programs(buckets, platform)
    test.made().compile(programs)
    return len(programs)


def self_test_programs(buckets: BucketConfig, platform: str) -> list[Program]:
    """The shapes of the self-test: those of a mixed step of the engine, of its largest decode-only step, and of its
    largest speculative step if it has any."""
    tokens = min(TEST_TOKENS_OF_GPUS if platform == "gpu" else TEST_TOKENS, buckets.max_num_batched_tokens)
    ladder = BucketLadder(buckets)
    rows = min(buckets.max_num_seqs, tokens - 1)
    mixed = ladder.choose(tokens, rows, decode_only=False, variant=Variant.SAMPLE)
    most = buckets.max_num_seqs
    programs = [Program(num_tokens=mixed.num_tokens, num_rows=mixed.num_rows), Program(num_tokens=most, num_rows=most)]
    if buckets.num_drafts:
        most, each = buckets.max_draft_rows, 1 + buckets.num_drafts
        programs.append(Program(num_tokens=most * each, num_rows=most, spec_decode=True))
    return programs


@dataclass(frozen=True, kw_only=True)
class _Test:
    """The self-test of one backend. It can be pickled if its attention has no mesh."""

    attention: PagedAttention
    settings: EngineSettings
    buckets: BucketConfig
    platform: str
    max_model_len: int

    def of_kernels(self, limit_s: float, folder: Place | None, *, may_fail: bool) -> tuple[str, str]:
        """Runs the test, unless its verdict is kept or the settings forbid it. Returns the result as a word, and a
        remark.

        Args:
            limit_s: the seconds that the test may take.
            folder: the folder of compiled programs, where the verdict is kept; None: it is not kept.
            may_fail: whether another backend could replace this one.

        Raises:
            SelfTestError: the backend cannot be used here.
            ValueError: the test hangs, and this process cannot continue.
        """
        backend = self.attention.backend
        if backend is Backend.REFERENCE and self.platform == "cpu":
            return NOT_TESTED, f"attention backend {backend}: a test is {NOT_TESTED}"
        if self.settings.self_test == "never":
            logger.warning("the attention backend %s is not tested: %s", backend, FORBIDDEN)
            return NEVER, f"WARNING: the attention backend {backend} is not tested: {FORBIDDEN}"
        verdict = KeptVerdict(self.facts(), self.platform, folder)
        if self.settings.self_test == "kept" and (remark := verdict.read()) is not None:
            return PASSED_BEFORE, f"{remark}, at an earlier start"
        verdict.delete()
        remark = self._remark(limit_s, may_fail=may_fail)
        verdict.write(remark)
        return PASSED, remark

    def facts(self) -> tuple[object, ...]:
        """All that decides whether the kernels pass, besides code, versions, options and devices."""
        attention, programs = self.attention, self_test_programs(self.buckets, self.platform)
        kind = type(attention)
        shapes = attention.spec, attention.backend, attention.num_shards, self.max_model_len
        return f"{kind.__module__}.{kind.__qualname__}", shapes, programs

    def _remark(self, limit_s: float, *, may_fail: bool) -> str:
        """Runs the test in the right process, and returns its remark."""
        backend = self.attention.backend
        with _warning_after(LONG_S, f"the self-test of the attention backend {backend} takes long: {HANGS}"):
            if can_a_child_test(backend, may_fail=may_fail):
                without_mesh = replace(self, attention=replace(self.attention, mesh=None))
                try:
                    given = without_mesh, self.attention.num_shards
                    outcome = in_child(_in_this_child, *given, limit_s=limit_s, numpy_threads=NUMPY_THREADS)
                except ChildError as error:
                    raise SelfTestError(str(error)) from error
                if isinstance(outcome, SelfTestError):
                    raise outcome
                if not isinstance(outcome, NoDevice):
                    return outcome
                logger.warning(
                    "attention backend %s: its self-test has no process of its own: %s", backend, outcome.reason
                )
            return _in_a_thread(self.run, backend, None if backend.is_interpreted else limit_s)

    def run(self) -> str:
        """Runs the test in this process and thread, and returns its remark. Raises SelfTestError if it fails."""
        started, attention = time.perf_counter(), self.attention
        test = self.made()
        in_c: tuple[Any, ...] = (products, per_token) if attention.backend is Backend.CPU else ()
        if in_c and library.has_four_bit():
            in_c += (four_bit,)
        if fault := next(filter(None, (part.fault() for part in in_c)), None):
            raise SelfTestError(fault)
        passed = test.run(self_test_programs(self.buckets, self.platform))
        return (
            f"attention backend {attention.backend} agrees with float32 within {passed.largest_error:.2%} in "
            f"{passed.num_steps} steps ({time.perf_counter() - started:.1f} s)"
        )

    def made(self) -> SelfTest:
        """The test of the kernels, of which nothing is compiled yet."""
        return SelfTest(
            self.attention,
            pages_per_seq=-(-self.max_model_len // self.attention.spec.page_size),
            longest=LONGEST_ON_GPUS if self.platform == "gpu" else LONGEST,
            compiler_options=compiler_options(self.platform),
        )


@dataclass(frozen=True)
class NoDevice:
    """A second process cannot use the chips."""

    reason: str


def _in_this_child(test: _Test, num_chips: int) -> str | SelfTestError | NoDevice:
    """Runs a test over so many chips in a child process. Returns its remark or its error."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the other process's pool has most of the memory
    try:
        start_jax(test.settings)
    except ValueError as error:
        return NoDevice(str(error))
    if num_chips > 1:
        test = replace(test, attention=replace(test.attention, mesh=make_mesh(num_chips)))
    try:
        return test.run()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return NoDevice(str(error))
        if isinstance(error, SelfTestError):
            return error
        raise


def _in_a_thread[T](work: Callable[[], T], backend: str, limit_s: float | None) -> T:
    """The result of `work()`, which runs in another thread. Raises ValueError after `limit_s` seconds."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="self-test", daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        if future.done():
            raise
        late = f"the self-test of the attention backend {backend} did not end within {limit_s:g} s"
        raise ValueError(f"{late}: {HANGS}") from None


@contextmanager
def _warning_after(seconds: float, message: str) -> Iterator[None]:
    """Logs `message` if the context takes longer than this time."""
    timer = threading.Timer(seconds, logger.warning, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warning(info: AttentionInfo, first: Backend) -> str:
    """The warning that the first candidate does not serve: the reason, the cost, and what to do."""
    slower = "several times slower" if info.backend == Backend.REFERENCE else "slower"
    said = f"WARNING: serving with the attention backend {info.backend}, {slower} than the backend {first}. "
    said += f"Not used: {_reasons(info.failures)}"
    return f"{said}. {TO_REPORT}" if FAILED in said else said


def _reasons(failures: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in failures.items())
