"""Runs the operation on random batches and compares every output with dense attention in float32.

An engine runs this before it is ready, so a kernel with wrong results on a chip never serves a token.

The steps are like those of a small server: mixed steps append chunks of a few sequences, and decode steps continue
them. Only the operation itself writes to the pages, so this module does not depend on a backend's layout. All memory
without a token is poisoned: free pages and, in every second step, the queries, keys and values of padding. The poison
is NaN for pages of floats and the lowest number for pages of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import dense, quantised, validate
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, RaggedBatch

# The largest error, as a share of the row's largest output. Inputs and probabilities of 16 bits give errors below a
# third of it. One key too many or too few gives a larger error, in a row of some hundred keys.
TOLERANCE = 0.02
LONGEST = 700  # tokens of a sequence: several blocks of every kernel
# Tokens of one sequence before the decodes, if sequences may be that long. GPUs cut the keys of a long sequence into
# parts, and merge the partial results.
LONG, LONGEST_ON_GPUS = 800, 1000
SPARE_PAGES = 3  # pages that no sequence owns, besides the null page
MIXED_STEPS, DECODE_STEPS = 3, 2  # steps of each program


class SelfTestError(RuntimeError):
    """A program does not compile, or its numbers are wrong. The message names the program."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The shape of a program. If T == S, it is for decodes only."""

    num_tokens: int
    num_rows: int
    spec_decode: bool = False  # every row has at most num_tokens // num_rows tokens: a speculative step

    @property
    def decode_only(self) -> bool:
        """Whether every row has one token."""
        return self.num_tokens == self.num_rows

    @property
    def most_queries(self) -> int:
        """The most tokens of a row."""
        return self.num_tokens // self.num_rows if self.spec_decode else self.num_tokens

    def __str__(self) -> str:
        if self.decode_only:
            return f"decode of {self.num_rows} rows"
        if self.spec_decode:
            return f"step of {self.num_rows} rows of up to {self.most_queries} tokens"
        return f"mixed step of {self.num_tokens} tokens in {self.num_rows} rows"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence's tokens in a step."""

    sequence: int
    past: int  # tokens that are already in pages; 0: the sequence starts
    count: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of one step, single tokens first."""

    program: Program
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """The figures of a test without a fault."""

    num_steps: int
    largest_error: float  # as a share of its row's largest output


@dataclass
class _Sequence:
    pages: np.ndarray  # the ids that it owns
    keys: list[np.ndarray] = field(default_factory=list)  # [1, K, H] each, as stored
    values: list[np.ndarray] = field(default_factory=list)


def plan_steps(
    programs: Sequence[Program], *, num_sequences: int, longest: int, rng: np.random.Generator
) -> list[Step]:
    """Random steps of every program. Mixed steps come first, so that the decodes find sequences of several lengths. A
    sequence that has no room starts again, and its pages then have stale content."""
    lengths = [0] * num_sequences
    steps = []
    for program in sorted(programs, key=lambda program: program.decode_only):
        if program.decode_only and longest >= LONG + DECODE_STEPS * len(programs):
            steps += _lengthen(lengths, programs)
        for _ in range(DECODE_STEPS if program.decode_only else MIXED_STEPS):
            order = [int(i) for i in rng.permutation(num_sequences)[: program.num_rows]]
            counts = [1] * len(order) if program.decode_only else _chunks(len(order), program.num_tokens, rng)
            rows = []
            for sequence, count in zip(order, counts, strict=True):
                past, count = lengths[sequence], min(count, longest, program.most_queries)
                row = Row(sequence=sequence, past=past if past + count <= longest else 0, count=count)
                lengths[sequence] = row.past + row.count
                rows.append(row)
            steps.append(Step(program=program, rows=tuple(sorted(rows, key=lambda row: row.count > 1))))
    return steps


def _lengthen(lengths: list[int], programs: Sequence[Program]) -> list[Step]:
    """Steps of the largest mixed program, if there is one, in which the first sequence grows to `LONG` tokens."""
    mixed = [program for program in programs if not program.decode_only and not program.spec_decode]
    steps = []
    while mixed and lengths[0] < LONG:
        program = max(mixed, key=lambda program: program.num_tokens)
        row = Row(sequence=0, past=lengths[0], count=max(min(program.num_tokens, LONG - lengths[0]), 2))
        lengths[0] = row.past + row.count
        steps.append(Step(program=program, rows=(row,)))
    return steps


def _projection(
    queries: jax.Array, keys: jax.Array, values: jax.Array, num_shards: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The columns, cos and sin for `PagedAttention.projected` that give these heads after the rotation.

    All rotations are multiples of a quarter turn, which are exact in every dtype."""
    tokens, _, head_dim = queries.shape
    turns = (jnp.arange(tokens)[:, None, None] + 3 * jnp.arange(head_dim // 2)) % 4
    cos, sin = jnp.array([1.0, 0.0, -1.0, 0.0])[turns], jnp.array([0.0, 1.0, 0.0, -1.0])[turns]

    def turned_back(heads: jax.Array) -> jax.Array:
        first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
        back = jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
        return back.astype(heads.dtype)

    parts = (turned_back(queries), turned_back(keys), values)
    by_chip = jnp.concatenate([part.reshape(tokens, num_shards, -1) for part in parts], axis=-1)
    return by_chip.reshape(tokens, -1), cos, sin


def _chunks(num_rows: int, num_tokens: int, rng: np.random.Generator) -> list[int]:
    """The number of tokens of each row: single tokens first, then at least one chunk of two or more tokens. Their sum
    is at most `num_tokens`, which must exceed `num_rows`."""
    total = int(rng.integers(max(num_rows + 1, num_tokens // 2), num_tokens + 1))
    singles = int(rng.integers(max(0, 2 * num_rows - total), num_rows))
    spare = total + singles - 2 * num_rows
    shares = rng.dirichlet(np.full(num_rows - singles, 0.5))  # unequal shares: one chunk is often long
    return [1] * singles + [2 + int(share * spare) for share in shares]


class SelfTest:
    """Tests one `PagedAttention`. Each program is compiled only once for all calls of `run`.

    Args:
        pages_per_seq: the width of the page table, on which block sizes depend.
        num_sequences: the most sequences; a program with fewer rows takes some of them.
        longest: the most tokens of a sequence, which its page table also limits.
        first_page: the first page of the tested layer; pages of the pool before it belong to other layers.
    """

    def __init__(
        self,
        attention: PagedAttention,
        *,
        pages_per_seq: int,
        num_sequences: int = 4,
        longest: int = LONGEST,
        first_page: int = 0,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._attention, self._pages_per_seq, self._num_sequences = attention, pages_per_seq, num_sequences
        self._longest = min(longest, pages_per_seq * attention.spec.page_size)
        self._pages_each = -(-self._longest // attention.spec.page_size)
        self._first_page = first_page
        self._num_pages = 1 + num_sequences * self._pages_each + SPARE_PAGES
        self._compiler_options = dict(compiler_options or {})
        self._compiled: dict[Program, Any] = {}

    def run(
        self,
        programs: Sequence[Program],
        *,
        seed: int = 0,
        before_step: Callable[[], None] = lambda: None,
        repeat: bool = False,
    ) -> Passed:
        """Tests `programs` on random steps.

        Args:
            before_step: is called before each step, to poison the device's free memory, for example.
            repeat: runs every step twice and compares the bits of both results.

        Raises:
            SelfTestError: a program does not compile or run, or its numbers are wrong.
        """
        self._begin(seed)
        steps = plan_steps(programs, num_sequences=self._num_sequences, longest=self._longest, rng=self._rng)
        pages, largest = self._poisoned_pages(), 0.0
        for number, step in enumerate(steps):
            poisoned = number % 2 == 0
            arrays = self._operands(step, poisoned=poisoned)
            program = self._program(step.program, jax.device_put(arrays, self._sharding), pages)
            results = []
            for kv_pages in (pages, jnp.copy(pages)) if repeat else (pages,):
                before_step()
                try:
                    output, pages = program(*jax.device_put(arrays, self._sharding), kv_pages)
                    results.append((np.asarray(output), np.asarray(self._own_pages(pages))))
                except Exception as error:
                    raise SelfTestError(f"{step.program} does not run: {_first_line(error)}") from error
            real = sum(row.count for row in step.rows)
            first, last = ([_bits(output[:real]), _bits(after)] for output, after in (results[0], results[-1]))
            if not all(map(np.array_equal, first, last)):
                raise SelfTestError(f"{step.program} gives other bits when it is run again")
            of_step = self._compare(step, arrays[1], results[0][0], padding_is_finite=not poisoned)
            largest = max(largest, of_step)
            self._check_free_pages(step, results[0][1])
        self._check_other_layers(pages)
        return Passed(num_steps=len(steps), largest_error=largest)

    def _begin(self, seed: int) -> None:
        """Divides the pages among sequences without tokens."""
        self._rng = np.random.default_rng(seed)
        ids = 1 + self._rng.permutation(self._num_pages - 1).astype(np.int32)
        owned = ids[: self._num_sequences * self._pages_each].reshape(self._num_sequences, -1)
        self._sequences = [_Sequence(pages=pages) for pages in owned]
        self._free = np.append(ids[owned.size :], 0)
        self._scales = _kv_scales(self._attention.spec, self._rng)

    def compile(self, programs: Sequence[Program]) -> None:
        """Compiles the programs that `run` runs. The devices may be descriptions. Raises SelfTestError if a program
        does not compile."""
        self._begin(seed=0)
        for program in programs:
            pages = self._attention.kv_pages(self._first_page + self._num_pages)
            arrays = self._operands(Step(program=program, rows=()), poisoned=False)
            described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), arrays)
            self._program(program, described, pages)

    def _program(self, program: Program, placed: tuple[Any, ...], pages: Any) -> Any:
        if program in self._compiled:
            return self._compiled[program]

        def step(
            batch: RaggedBatch, queries: Any, keys: Any, values: Any, scales: Any, first_page: Any, pages: Any
        ) -> Any:
            metadata = self._attention.make_metadata(
                batch,
                num_tokens=program.num_tokens,
                decode_only=program.decode_only,
                spec_decode=program.spec_decode,
            )
            if self._attention.takes_projection:  # serving calls `projected` then
                projection = _projection(queries, keys, values, self._attention.num_shards)
                output, pages = self._attention.projected(*projection, pages, metadata, first_page, kv_scales=scales)
                return output.reshape(queries.shape), pages
            return self._attention(queries, keys, values, pages, metadata, first_page, kv_scales=scales)

        try:
            lowered = jax.jit(step, donate_argnums=6).lower(*placed, pages)
            self._compiled[program] = lowered.compile(compiler_options=self._compiler_options)
        except Exception as error:
            raise SelfTestError(f"{program} does not compile: {_first_line(error)}") from error
        return self._compiled[program]

    @property
    def _sharding(self) -> NamedSharding | None:
        """The operands are on the device, or on all chips of the mesh."""
        mesh = self._attention.mesh
        return None if mesh is None else NamedSharding(mesh, P())

    def _poisoned_pages(self) -> jax.Array:
        """Pages that are filled with poison. They are made on the device, because a pool of serving size does not fit
        into the host's memory. A compiler may change the bits of a NaN (it does on CPUs without instructions for
        bfloat16), so `_poison` is read back from the device."""
        spec, like = self._attention.spec, self._attention.kv_pages(self._first_page + self._num_pages)
        kv_dtype = jnp.dtype(spec.kv_dtype)
        # The NaN of padding has the other sign.
        worst = jnp.iinfo(kv_dtype).min if jnp.issubdtype(kv_dtype, jnp.integer) else -np.nan
        value = np.full(like.dtype.itemsize // kv_dtype.itemsize, worst, kv_dtype).view(like.dtype)[0]
        pages = jax.jit(lambda: jnp.full(like.shape, value), out_shardings=like.sharding)()
        self._poison = _bits(np.asarray(pages[(0,) * pages.ndim]))
        return pages

    def _own_pages(self, pages: jax.Array) -> jax.Array:
        if not self._first_page:
            return pages
        return lax.slice_in_dim(pages, self._first_page, None, axis=self._attention.page_axis)

    def _check_other_layers(self, pages: jax.Array) -> None:
        """Checks that no page of another layer was written to. The device compares, because there may be many pages."""
        if not self._first_page:
            return

        def is_poison(pages: jax.Array) -> jax.Array:
            others = lax.slice_in_dim(pages, 0, self._first_page, axis=self._attention.page_axis)
            content = self._poison.view(f"u{pages.dtype.itemsize}")[0]
            return (lax.bitcast_convert_type(others, content.dtype) == content).all()

        if not jax.jit(is_poison)(pages):
            raise SelfTestError("a page of another layer was written to")

    def _operands(self, step: Step, *, poisoned: bool) -> tuple[Any, ...]:
        """The batch, the queries, keys and values, the scales and the first page of a step. The tokens are drawn at
        random and appended to the sequences."""
        spec, program = self._attention.spec, step.program
        kv = (spec.num_kv_heads, spec.head_dim)
        num_real = sum(row.count for row in step.rows)
        dtype = jnp.dtype(spec.dtype)
        queries, keys, values = (
            self._rng.standard_normal((program.num_tokens, *shape), np.float32).astype(dtype)
            for shape in ((spec.num_query_heads, spec.head_dim), kv, kv)
        )
        table = np.zeros((program.num_rows, self._pages_per_seq), np.int32)
        kv_lens = np.zeros(program.num_rows, np.int32)
        starts = np.full(program.num_rows + 1, num_real, np.int32)
        begin = 0
        for index, row in enumerate(step.rows):
            sequence, new = self._sequences[row.sequence], slice(begin, begin + row.count)
            sequence.keys[row.past :] = stored(keys[new], self._scales, 0, spec)
            sequence.values[row.past :] = stored(values[new], self._scales, 1, spec)
            kv_lens[index] = row.past + row.count
            used = -(-kv_lens[index] // spec.page_size)
            table[index, :used] = sequence.pages[:used]
            starts[index] = begin
            begin += row.count
        if poisoned:
            for x in (queries, keys, values):
                x[num_real:] = np.nan
        on_host: dict[str, Any] = {
            "page_table": table,
            "kv_lens": kv_lens,
            "query_starts": starts,
            "num_singles": np.int32(sum(row.count == 1 for row in step.rows)),
            "num_rows": np.int32(len(step.rows)),
        }
        batch = RaggedBatch(**on_host)
        validate.page_table(batch, num_pages=self._num_pages, page_size=spec.page_size)
        return batch, queries, keys, values, self._scales, np.int32(self._first_page)

    def _compare(self, step: Step, queries: np.ndarray, output: np.ndarray, *, padding_is_finite: bool) -> float:
        """The largest error of a row. Raises SelfTestError if one is too large."""
        spec, begin, largest = self._attention.spec, 0, 0.0
        group = spec.num_query_heads // spec.num_kv_heads
        per_head = None if self._scales is None else np.repeat(self._scales, group, axis=1)[..., None]
        for row in step.rows:
            tokens, sequence = slice(begin, begin + row.count), self._sequences[row.sequence]
            own, found = queries[tokens], output[tokens].astype(np.float32)
            if per_head is not None:
                own = (own.astype(np.float32) * per_head[0]).astype(queries.dtype)
            wanted = dense.attend(own, np.stack(sequence.keys), np.stack(sequence.values), scale=spec.scale)
            if per_head is not None:
                wanted = wanted * per_head[1]
            error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            if not error <= TOLERANCE:  # also true for NaN
                kind = "a single token" if row.count == 1 else f"a chunk of {row.count} tokens"
                raise SelfTestError(
                    f"{step.program}: {kind} over {row.past + row.count} keys is wrong: "
                    + ("not a number" if np.isnan(error) else f"off by {error:.1%} of its largest value")
                )
            largest = max(largest, error)
            begin += row.count
        if padding_is_finite and not np.isfinite(output.astype(np.float32)).all():
            raise SelfTestError(f"{step.program}: the output of a padding token is not finite")
        return largest

    def _check_free_pages(self, step: Step, pages: np.ndarray) -> None:
        axis = self._attention.page_axis
        free = _bits(np.take(pages, self._free, axis=axis))
        if (free.reshape(-1, self._poison.size) != self._poison).any():
            raise SelfTestError(f"{step.program}: a page that no sequence owns was written to")


def stored(x: np.ndarray, scales: np.ndarray | None, kind: int, spec: AttentionSpec) -> np.ndarray:
    """Keys (`kind` 0) or values (`kind` 1) [Q, K, H] in the form in which the pages store them."""
    if scales is None:
        return x
    largest = quantised.LARGEST[jnp.dtype(spec.kv_dtype)]
    units = np.clip(x.astype(np.float32) * (np.float32(1) / scales[kind])[:, None], -largest, largest)
    return (np.rint(units) if jnp.issubdtype(spec.kv_dtype, jnp.integer) else units).astype(jnp.dtype(spec.kv_dtype))


def _kv_scales(spec: AttentionSpec, rng: np.random.Generator) -> np.ndarray | None:
    """The scales f32[2, K] for pages of 8 bits; None for others. They differ, and clip few normal values."""
    if not spec.has_kv_scales:
        return None
    largest = quantised.LARGEST[jnp.dtype(spec.kv_dtype)]
    return (rng.uniform(3.0, 5.0, (2, spec.num_kv_heads)) / largest).astype(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    """The bytes of x. They make two NaN equal only if their bits are equal."""
    return np.ascontiguousarray(x).view(np.uint8)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
