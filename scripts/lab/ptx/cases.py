"""Steps of attention whose kernels are executed, and what is wrong with them.

Everything that must not be read is NaN: the rest of a last page, free pages, the null page, what no kernel has written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantised
from pallas_kernels.chips import arch_converts_fp8
from pallas_kernels.gpu import attention, device, tuning
from pallas_kernels.gpu.parts import Parts
from pallas_kernels.spec import AttentionSpec, RaggedBatch
from scripts.lab.accounts.specs import make_spec
from scripts.lab.accounts.targets import gpu_target
from scripts.lab.ptx import launch, machine
from scripts.lab.ptx.hazards import Hazard
from scripts.lab.ptx.isa import Instruction
from scripts.lab.ptx.launch import KernelCall, executed
from scripts.lab.ptx.parse import parse

SHORTEST_PART = 64  # keys of a decode: short rows are cut, too
SHOWN = 12  # hazards of a report
TOLERANCE = 0.03  # bfloat16 in, float32 inside, weights rounded to bfloat16
FORMS = ("decode", "prefill", "combine")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a step."""

    rows: tuple[tuple[int, int], ...]  # (tokens of the step, keys with them) of each sequence; single tokens first
    heads: tuple[int, int, int] = (2, 1, 64)  # query heads, KV heads, head dim
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # of the pages, as `dtype` unless given
    padding_tokens: int = 0
    padding_rows: int = 0
    spec_decode: bool = False
    first_page: int = 0
    multiprocessors: int = 2  # few, so that a block takes several items
    parts: Parts | None = None  # how prefill's rows are cut, instead of the chip's own way

    @property
    def decode_only(self) -> bool:
        """Whether the program has no prefill."""
        return not self.spec_decode and all(tokens == 1 for tokens, _ in self.rows)


IN_PARTS = Parts(max_parts=4, min_keys=128, max_slots=128)
SHAPES = {
    "decode": Shape(rows=((1, 191), (1, 70))),
    "prefill": Shape(rows=((1, 33), (19, 90), (3, 3)), padding_tokens=4),
    "combine": Shape(rows=((1, 300), (7, 300)), parts=IN_PARTS),
    "odd decodes": Shape(rows=((1, 1), (1, 63), (1, 65), (1, 128)), heads=(8, 2, 64), padding_rows=2, padding_tokens=2),
    "a padding tile": Shape(rows=((1, 70), (1, 9), (19, 100), (3, 3)), heads=(4, 1, 64), padding_tokens=22),
    "rows of padding": Shape(rows=((1, 5),), heads=(8, 1, 128), page_size=16, padding_rows=3, padding_tokens=3),
    "an empty step": Shape(rows=(), padding_rows=2, padding_tokens=16, spec_decode=True),
    "drafts": Shape(rows=((4, 70), (1, 20), (3, 3)), heads=(4, 1, 64), spec_decode=True),
    "several tiles": Shape(rows=((1, 700), (1, 40), (70, 330), (30, 30)), heads=(4, 2, 64)),  # and several items
    "several tiles, fp8": Shape(rows=((1, 200), (40, 330)), heads=(4, 1, 128), kv_dtype="float8_e4m3fn"),
    "twelve heads in a group": Shape(rows=((1, 40), (9, 75)), heads=(12, 1, 64), page_size=32),
    "wide heads": Shape(rows=((1, 130), (17, 140)), heads=(4, 2, 128), page_size=128),
    "int8": Shape(rows=((1, 70), (18, 85)), heads=(4, 1, 64), page_size=16, kv_dtype="int8"),
    "fp8": Shape(rows=((1, 70), (18, 85)), heads=(4, 1, 128), kv_dtype="float8_e4m3fn"),
    "int8 decodes in parts": Shape(rows=((1, 1), (1, 300), (1, 65)), heads=(8, 2, 128), page_size=16, kv_dtype="int8"),
    "float16, a later layer": Shape(rows=((1, 20), (5, 40)), heads=(4, 1, 64), dtype="float16", first_page=3),
}
COVERING = ("combine", "several tiles", "int8")  # these execute nearly every instruction of every form


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which instructions of a kernel have been executed."""

    name: str
    code: tuple[Instruction, ...]
    executed: bytearray  # by the instruction's index: 1, or 0

    def __str__(self) -> str:
        return f"{self.name}: {sum(self.executed)} of {len(self.code)} instructions"

    @property
    def left_out(self) -> list[str]:
        """The others, as lines with their places in the kernel's source."""
        left = [ins for ins, seen in zip(self.code, self.executed, strict=True) if not seen]
        return [f"    line {ins.line} ({ins.source}): {ins.text}" for ins in left]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong with a step; nothing if both are empty."""

    hazards: tuple[tuple[str, Hazard], ...] = ()  # with the kernel's name
    wrong: tuple[str, ...] = ()
    coverage: tuple[Coverage, ...] = ()

    def __str__(self) -> str:
        more = len(self.hazards) - SHOWN
        shown = [f"{name}: {hazard}" for name, hazard in self.hazards[:SHOWN]]
        return "\n".join([*shown, *self.wrong, *([f"and {more} more"] if more > 0 else [])])


class Case:
    """A step's arrays."""

    def __init__(self, shape: Shape, arch: tuple[int, int], seed: int = 0) -> None:
        kv_dtype = shape.kv_dtype
        if kv_dtype == "float8_e4m3fn" and not arch_converts_fp8(arch):
            kv_dtype = "int8"
        self.shape, self.rng = shape, np.random.default_rng(seed)
        self.spec: AttentionSpec = make_spec(shape.heads, shape.page_size, jnp.dtype(shape.dtype), kv_dtype)
        num_heads, num_kv_heads, head_dim = shape.heads
        self.scales = self.rng.uniform(2.5, 5.0, (2, num_kv_heads)).astype(np.float32) / np.float32(
            quantised.LARGEST.get(jnp.dtype(self.spec.kv_dtype), 1)
        )
        self.num_real = sum(tokens for tokens, _ in shape.rows)
        self.num_tokens = self.num_real + shape.padding_tokens
        self.queries = self._draw(self.num_tokens, num_heads, head_dim)
        self.kv = [self._draw(2, keys, num_kv_heads, head_dim) for _, keys in shape.rows]  # of each row
        self.step = self._draw(2, self.num_tokens, num_kv_heads, head_dim)
        start = 0
        for kv, (tokens, keys) in zip(self.kv, shape.rows, strict=True):
            taken = min(tokens, keys)
            kv[:, keys - taken :] = self.step[:, start : start + taken]
            start += tokens
        self.table = self._table()

    def _draw(self, *sizes: int) -> np.ndarray:
        return self.rng.standard_normal(sizes).astype(np.float32).astype(self.spec.dtype)

    def _table(self) -> np.ndarray:
        rows, size = self.shape.rows, self.shape.page_size
        needed = [-(-keys // size) for _, keys in rows]
        self.num_pages = sum(needed) + 3
        free = iter(1 + self.rng.permutation(self.num_pages - 1))
        table = np.zeros((len(rows) + self.shape.padding_rows, max(needed, default=1)), np.int32)
        for row, count in zip(table, needed, strict=False):
            row[:count] = [next(free) for _ in range(count)]
        return table

    @property
    def batch(self) -> RaggedBatch:
        """The step as the operation takes it."""
        rows, num_rows = self.shape.rows, len(self.table)
        lens = np.zeros(num_rows, np.int32)
        lens[: len(rows)] = [keys for _, keys in rows]
        starts = np.full(num_rows + 1, self.num_real, np.int32)
        starts[: len(rows)] = np.cumsum([0, *(tokens for tokens, _ in rows)])[:-1]
        singles = next((i for i, (tokens, _) in enumerate(rows) if tokens != 1), len(rows))
        return RaggedBatch(
            page_table=jnp.asarray(self.table), kv_lens=jnp.asarray(lens), query_starts=jnp.asarray(starts),
            num_singles=jnp.int32(singles), num_rows=jnp.int32(len(rows)),
        )  # fmt: skip

    def stored(self, kind: int, x: np.ndarray) -> np.ndarray:
        """Keys (0) or values (1) as the pages hold them."""
        if not self.spec.has_kv_scales:
            return x
        return np.asarray(quantised.quantise(jnp.asarray(x), jnp.asarray(self.scales[kind]), self.spec.kv_dtype))

    def pages(self, *, with_step: bool) -> np.ndarray:
        """Every row's keys and values in its pages, and poison elsewhere."""
        _, num_kv_heads, head_dim = self.shape.heads
        size, first, kind = self.shape.page_size, self.shape.first_page, jnp.dtype(self.spec.kv_dtype)
        poison = -128 if kind == jnp.int8 else np.nan
        pages = np.full((self.num_pages + first, 2, num_kv_heads, size, head_dim), poison, kind)
        for row, (kv, (tokens, keys)) in enumerate(zip(self.kv, self.shape.rows, strict=True)):
            places = np.arange(keys if with_step else max(keys - tokens, 0))
            for half in range(2):
                values = self.stored(half, kv[half, : len(places)])
                pages[self.table[row, places // size] + first, half, :, places % size] = values
        return pages

    def owner(self, page: int, slot: int) -> str:
        """Whose place in the pages this is."""
        for row, (_, keys) in enumerate(self.shape.rows):
            for at in np.flatnonzero(self.table[row] + self.shape.first_page == page) * self.shape.page_size + slot:
                if at < keys:
                    return f"of token {at} of row {row}"
        return "which is no token's"

    def expected(self) -> np.ndarray:
        """f64[real tokens, N, H]: attention in float64 over the values as they are stored."""
        num_heads, num_kv_heads, _ = self.shape.heads
        group, scaled = num_heads // num_kv_heads, self.spec.has_kv_scales
        factors = np.repeat(self.scales if scaled else np.ones((2, num_kv_heads), np.float32), group, 1)
        queries = (self.queries.astype(np.float32) * factors[0][:, None]).astype(self.spec.dtype).astype(np.float64)
        out, token = np.zeros((self.num_real, *self.queries.shape[1:])), 0
        for kv, (tokens, keys) in zip(self.kv, self.shape.rows, strict=True):
            k, v = (np.repeat(self.stored(i, x).astype(np.float64), group, axis=1) for i, x in enumerate(kv))
            for i in range(tokens):
                live = max(keys - tokens + i + 1, 0)
                scores = self.spec.scale * np.einsum("nh,tnh->nt", queries[token], k[:live])
                weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf)) if live else scores
                if live:
                    weights /= weights.sum(-1, keepdims=True)
                out[token] = np.einsum("nt,tnh->nh", weights, v[:live]) * factors[1][:, None]
                token += 1
        return out


def schedules(count: int) -> list[machine.Schedule]:
    """The first ones let copies land as late and as early as they may."""
    kinds = ["late", "early", *["random"] * count]
    return [machine.Schedule(seed=seed, landing=kind) for seed, kind in enumerate(kinds[:count])]


def run(
    shape: Shape,
    target_name: str,
    ways: Iterable[machine.Schedule],
    forms: Iterable[str] = FORMS,
    edit: Callable[[str], str] = str,
    *,
    mma_only: bool = False,
) -> Findings:
    """Executes the kernels of a step; those of `forms` under every schedule, others under the first.

    A process must execute kernels of one target only.

    Args:
        edit: changes the PTX of each kernel.
        mma_only: as on a Hopper chip whose kernels do without wgmma.
    """
    target, ways = gpu_target(target_name), list(ways)
    gpu = device.Gpu(arch=target.chip.arch, num_multiprocessors=shape.multiprocessors)
    case = Case(shape, gpu.arch)
    hazards: dict[tuple[str, str, int], tuple[str, Hazard]] = {}
    wrong: list[str] = []
    of_nan: dict[str, None] = {}
    writers: dict[str, int] = {}  # the places in the source that write the output, with a line of the PTX
    coverage: list[Coverage] = []

    def execute(call: KernelCall) -> list[np.ndarray]:
        first: list[np.ndarray] = []
        code = call.compiled.kernel.instructions
        coverage.append(Coverage(name=call.name, code=code, executed=bytearray(len(code))))
        for way in ways if call.name.split("_")[1] in forms else ways[:1]:
            started, outputs = call.launch()
            ran = machine.Machine(started, way)
            for hazard in ran.run():
                hazards.setdefault((call.name, hazard.kind, hazard.ins.index), (call.name, hazard))
            of_nan.update(dict.fromkeys(f"{call.name} line {ins.line} ({ins.source})" for ins in ran.made_nan))
            for index in np.flatnonzero(ran.program.executed):
                coverage[-1].executed[index] = 1
            for ins in (ins for array in outputs if array.name == "output" for ins in array.written_by.values()):
                writers.setdefault(f"{call.name} ({ins.source})", ins.line)
            results = [array.value for array in outputs]
            if first and not all(map(_agree, first, results)):
                wrong.append(f"{call.name}: other results under {way}")
            first = first or results
        return first

    with contextlib.ExitStack() as patches:
        patches.enter_context(executed(target, gpu, execute))
        patches.enter_context(mock.patch.object(launch, "parse", lambda ptx: parse(edit(ptx))))
        patches.enter_context(mock.patch.object(tuning, "MIN_DECODE_KEYS", SHORTEST_PART))
        if shape.parts is not None:
            patches.enter_context(mock.patch.object(tuning, "prefill_parts", return_value=shape.parts))
        output, pages = _step(case, mma_only=mma_only)
    error = np.abs(output[: case.num_real].astype(np.float64) - case.expected()).max(initial=0.0)
    if not error <= TOLERANCE:
        places = ", ".join(f"{where} line {line}" for where, line in writers.items())
        why = ", in 16-byte chunks that have each other's places, as under another swizzle"
        displaced = why if _has_displaced_chunks(output[: case.num_real], case.expected()) else ""
        wrong.append(f"the output is off by {error:g}{displaced}; it is written by {places}")
    if not np.isfinite(output.astype(np.float32)).all():
        why = f": products of weights 0 with NaN, not masked: {', '.join(of_nan)}" if of_nan else ""
        wrong.append(f"the output is not finite{why}")
    differing = np.argwhere((pages.view(np.uint8) != case.pages(with_step=True).view(np.uint8)).any((1, 2, 4)))
    if len(differing):
        first = ", ".join(f"page {page}, slot {slot}, {case.owner(page, slot)}" for page, slot in differing[:3])
        wrong.append(f"the pages are wrong in {len(differing)} slots: {first}")
    return Findings(hazards=tuple(hazards.values()), wrong=tuple(wrong), coverage=tuple(coverage))


def _has_displaced_chunks(output: np.ndarray, expected: np.ndarray) -> bool:
    """Whether each 128 bytes are right, but for the order of their 16-byte chunks in the manner of a swizzle."""
    found, right = (x.astype(np.float64).reshape(-1, 8, 8) for x in (output, expected))
    orders = [np.arange(8) ^ k for k in range(8)]
    return bool(np.any([(abs(found[:, order] - right) <= TOLERANCE).all((1, 2)) for order in orders], axis=0).all())


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a.astype(np.float64), b.astype(np.float64), atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


def _step(case: Case, *, mma_only: bool) -> tuple[np.ndarray, np.ndarray]:
    shape, spec = case.shape, case.spec
    kinds: dict[str, Any] = {"decode_only": shape.decode_only, "spec_decode": shape.spec_decode, "mma_only": mma_only}
    make = partial(attention.make_metadata, spec=spec, num_tokens=case.num_tokens, **kinds)
    metadata = jax.jit(make)(case.batch)
    operation: Any = partial(attention.append_and_attend, spec=spec, interpret=False, mma_only=mma_only)
    arrays = [case.queries, *case.step, case.pages(with_step=False)]
    if spec.has_kv_scales:
        operation = quantised.with_scales(operation, spec.kv_dtype)
    scales = [case.scales] if spec.has_kv_scales else []
    output, pages = operation(*map(jnp.asarray, arrays), metadata, shape.first_page, *map(jnp.asarray, scales))
    return np.asarray(output), np.asarray(pages)
