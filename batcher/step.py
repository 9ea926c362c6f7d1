"""The interface between the batcher and the runner that executes its steps: numpy arrays, one int32 buffer per step.

Shape legend of this room: `T` tokens of a step (padded), `S` rows of a step (padded), `W` columns of a slot's state.

The device keeps one row of state per *slot*. A request owns a slot from admission to its end or preemption. The host
updates rows with *patches*: (flat index, value) pairs that are applied before anything else in the step. Floats are
sent as their bits, so one i32 matrix and one i32 buffer hold all values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from batcher.request import MAX_LOGPROBS, Pooling

if TYPE_CHECKING:  # the HTTP process reads the sampling table, without numpy
    import numpy as np

HEADER_SIZE = 8  # num_singles (single-token rows), num_rows, num_tokens, looks_up; the rest is zero


class Variant(StrEnum):
    """The work of a step's program beyond the forward pass. One padded shape and one variant are one executable."""

    GREEDY = "greedy"  # argmax of the raw logits: no row has a mask, a bias, a penalty, a ban or logprobs
    SAMPLE = "sample"  # everything in SamplingParams except prompt_logprobs
    SCORE = "score"  # SAMPLE, and log-probabilities of every token in the step (prompt_logprobs)
    EMBED = "embed"  # SCORE, and the pooled hidden states of every row's tokens

    @property
    def scores(self) -> bool:
        """Whether the program gives log-probabilities of every token in the step."""
        return self in (Variant.SCORE, Variant.EMBED)


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """The padded shape of a step and its program. `num_tokens == num_rows` is a decode-only program: q_len 1 each.

    With `num_drafts` it is a speculative program: a decode brings its last token and up to so many drafts, which the
    program proposes and verifies.
    """

    num_tokens: int
    num_rows: int
    variant: Variant
    num_drafts: int = 0  # per row; num_tokens is then num_rows * (1 + num_drafts)
    num_steps: int = 1  # most tokens that a row draws one after the other; more than 1 for decodes only
    has_adapters: bool = False  # its rows may have LoRA adapters

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == self.num_rows


def longest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """In the order in which a start traces their programs, one after the other: those that take longest to compile come
    first. Prompts take a kernel of their own, and each variant takes what those before it do."""
    variants = list(Variant)

    def rank(bucket: Bucket) -> tuple[object, ...]:
        return bucket.variant.scores, not bucket.decode_only, variants.index(bucket.variant), bucket

    return sorted(buckets, key=rank, reverse=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """A runner's limits, known before the first request."""

    num_slots: int
    num_pages: int  # pages that requests can own, ids 1 to num_pages; the null page (0) is not among them
    page_size: int  # tokens
    max_model_len: int  # tokens of prompt and output of one request
    max_num_batched_tokens: int
    vocab_size: int
    pooling: Pooling | None = None  # of requests that embed; None: there can be none
    keeps_text: bool = False  # its programs keep the tokens of every page, from which drafts are taken
    max_loras: int = 0  # LoRA adapters that may run at once, in the adapter slots 1 to max_loras; 0: there are none
    page_bytes: int = 0  # of the K/V of one page, in the host's memory; 0: pages cannot leave the device
    pages_of_copy: int = 0  # most pages of one `read_pages`, `stage_pages` or `write_pages`

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def pages_of_small_copy(self) -> int:
        return pages_of_small_copy(self.pages_of_copy)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Offsets of the sections of the packed buffer of one bucket; the same arithmetic runs inside the program."""

    bucket: Bucket

    @property
    def num_patches(self) -> int:
        """Patches in the step's own buffer: enough for every row to cross a page boundary and for a few short
        admissions. Further patches are applied before the step, from `StepInput.patches`."""
        return 2 * self.bucket.num_rows + 64

    def sections(self) -> dict[str, slice[int, int, None]]:
        """name -> slice of the buffer: header, slots[S], q_lens[S], emits[S], tokens[T], patch_indices[K],
        patch_values[K], and for programs that score targets[T].

        Rows: decodes (q_len 1) first, then chunks. A padding row has slot == num_slots, q_len 0, emit 0. A token of -1
        stands for the slot's last token, or for a draft after it. A padding patch has an index past the end of the
        state. targets[t] is the prompt token that follows tokens[t], or -1 if it is not to be scored.
        """
        t, s, k = self.bucket.num_tokens, self.bucket.num_rows, self.num_patches
        sizes = {"header": HEADER_SIZE, "slots": s, "q_lens": s, "emits": s, "tokens": t}
        sizes |= {"patch_indices": k, "patch_values": k}
        if self.bucket.variant.scores:
            sizes["targets"] = t
        out, start = {}, 0
        for name, size in sizes.items():
            out[name] = slice(start, start + size)
            start += size
        return out

    @property
    def size(self) -> int:
        return max(s.stop for s in self.sections().values())


MASK_BLOCK = 16  # rows of one dispatch of masks
PATCH_BLOCK = 4096  # (index, value) pairs of one patch-only dispatch
MAX_STAGED_ADAPTERS = 2
SMALL_COPIES = 8  # have as many pages as a large one
MAX_PAGE_COPIES = 4  # on their way to the host at once, and as many that are staged


def pages_of_small_copy(most: int) -> int:
    """The most pages of a copy that costs less than one of `most` pages, the most that a copy can have."""
    return max(1, most // SMALL_COPIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyReset:
    """The token history of a request with penalties, counted on the device when it is admitted."""

    slot: int
    prompt: np.ndarray  # i32[n]
    output: np.ndarray  # i32[m], not empty after a preemption


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWrite:
    """The weights of a staged LoRA adapter go into an adapter slot, in place of those that it holds."""

    slot: int  # 1 to max_loras
    adapter: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """The runner's input for one step: one packed buffer, and the updates to apply before the step."""

    bucket: Bucket
    packed: np.ndarray  # i32[PackedLayout(bucket).size]
    patches: tuple[np.ndarray, ...] = ()  # each i32[2, PATCH_BLOCK], applied before the step, in order
    penalty_resets: tuple[PenaltyReset, ...] = ()  # applied before the step
    masks: tuple[np.ndarray, ...] = ()  # each i32[MASK_BLOCK, 1 + num_mask_words], slots first; num_slots is padding
    adapters: tuple[AdapterWrite, ...] = ()  # applied before the step; afterwards these adapters are staged no longer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Results by row; those of rows without emit are undefined. Log-probabilities are of the raw logits.

    `D` is 1 + num_drafts, or num_steps. With drafts, a row has drawn 1 + num_accepted[row] tokens, of which all but the
    last equal its drafts. With several steps, it has drawn as many as it brought. The slot's LAST_TOKEN is the last of
    them, and its KV_LEN has grown by their number. In other steps it is one token.
    """

    tokens: np.ndarray  # i32[S, D]
    finite: np.ndarray  # bool[S]: False if the logits of one of the row's tokens held a NaN or infinity; of several
    # steps bool[S, D], of each token
    num_drafts: np.ndarray | None = None  # i32[S], proposed for the row; None: the program has no drafts
    num_accepted: np.ndarray | None = None  # i32[S]
    # bool[S]: whether the row's first token is what its first draft is or would have been. Of all programs with drafts;
    # if drafts are looked up, also of those without, of decodes only, that have no more rows than them. In these it has
    # a meaning only if the header says `looks_up`.
    would_accept: np.ndarray | None = None
    logprobs: np.ndarray | None = None  # f32[S, D], all but GREEDY
    top_ids: np.ndarray | None = None  # i32[S, D, MAX_LOGPROBS], most likely first
    top_logprobs: np.ndarray | None = None  # f32[S, D, MAX_LOGPROBS]
    sampled_logprobs: np.ndarray | None = None  # f32[S, D], all but GREEDY: under the distribution of the draw
    target_logprobs: np.ndarray | None = None  # f32[T], SCORE and EMBED: of targets[t]
    target_top_ids: np.ndarray | None = None  # i32[T, MAX_LOGPROBS]
    target_top_logprobs: np.ndarray | None = None  # f32[T, MAX_LOGPROBS]
    target_ranks: np.ndarray | None = None  # i32[T], of targets[t]: 1 for the most likely token
    pooled: np.ndarray | None = None  # f32[S, D], EMBED: of the row's last token, or the sum of all its tokens


class StepHandle(Protocol):
    """A step that has been dispatched."""

    def result(self) -> StepOutput:
        """Blocks until the device is done. Called from the reader thread, once."""


class PagesRead(Protocol):
    """Pages of the device whose K/V are on their way to the host."""

    def copy_to(self, pages: Sequence[np.ndarray]) -> None:
        """Blocks until the device is done, and fills these, each u8[page_bytes], in the order of `read_pages`. Called
        once, from a thread of its own. Raises the device's error."""


class StagedPages(Protocol):
    """K/V of pages that are on the device, but in no page yet."""


class Runner(Protocol):
    """Executes steps in the order of the calls. `model.execution.runner` implements it."""

    def capacity(self) -> Capacity: ...

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> Collection[Bucket]:
        """Compiles the buckets' programs and runs each once. After this `num_compiles` never changes.

        Returns those of `may_wait` that it has left for `compile_later`, because compiling them takes long.
        """

    def compile_later(self, bucket: Bucket, report: Callable[[str], None]) -> None:
        """Compiles a program that `warm_up` has left; it does not count in `num_compiles`. Called from a thread of its
        own while steps run, for one bucket after the other."""

    def execute(self, step: StepInput) -> StepHandle:
        """Dispatches one step and returns at once. Raises KeyError if its bucket was not warmed up."""

    def stage_adapter(self, adapter: int) -> None:
        """Brings the weights of a LoRA adapter to the device. A later `AdapterWrite` copies them into a slot. Blocks;
        called from a thread of its own while steps run. At most `MAX_STAGED_ADAPTERS` are staged at once.

        Raises ValueError or OSError if the weights cannot be read any more.
        """

    def unstage_adapter(self, adapter: int) -> None:
        """Frees the weights of a staged adapter, which no step will write. An adapter that is not staged is ignored."""

    def read_pages(self, pages: Sequence[int]) -> PagesRead:
        """Dispatches a copy of these pages, at most `pages_of_copy`, to the host, and returns at once. Steps that come
        later may write to the pages. Called from the thread that calls `execute`, while fewer than `MAX_PAGE_COPIES`
        wait for `copy_to`."""

    def stage_pages(self, pages: Sequence[np.ndarray]) -> StagedPages:
        """Brings what `PagesRead.copy_to` gave, at most `pages_of_copy` pages, to the device. Blocks until the arrays
        may change; called from a thread of its own while steps run. At most `MAX_PAGE_COPIES` are there at once: each
        is written, or forgotten by the caller."""

    def write_pages(self, staged: StagedPages, pages: Sequence[int]) -> None:
        """Dispatches a copy of staged pages to these, in the order of `stage_pages`, and returns at once. These all
        differ, and there may be fewer of them. Called from the thread that calls `execute`, once for each `staged`."""

    def recover(self) -> None:
        """Prepares the device for further steps after a failed one. No step is in flight. Slot state, pages and adapter
        slots may be lost; staged adapters are.

        Raises the device's error if it cannot go on; the engine then dies.
        """

    @property
    def num_compiles(self) -> int: ...


assert MAX_LOGPROBS <= 32, "top-k of the log-probabilities is a small unrolled selection on some chips"
