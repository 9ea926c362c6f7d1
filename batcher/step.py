"""The interface between the batcher and the runner that executes its steps: numpy arrays, one int32 buffer per step.

Shape legend of `batcher`: `T` tokens of a step (padded), `S` rows of a step (padded), `W` columns of a slot's state.

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

if TYPE_CHECKING:  # the HTTP process imports the sampling table without numpy
    import numpy as np

HEADER_SIZE = 8  # num_singles (single-token rows), num_rows, num_tokens, looks_up; the rest is zero


class Variant(StrEnum):
    """The work of a step's program beyond the forward pass. Each padded shape and variant has its own executable."""

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
    """The padded shape of a step and its program. If `num_tokens == num_rows`, the program is for decodes only: each
    row has one token.

    With `num_drafts` it is a speculative program: a decode has its last token and up to `num_drafts` drafts, which the
    program proposes and verifies.
    """

    num_tokens: int
    num_rows: int
    variant: Variant
    num_drafts: int = 0  # per row; num_tokens is then num_rows * (1 + num_drafts)
    has_adapters: bool = False  # its rows may have LoRA adapters

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == self.num_rows


def longest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The buckets in the order in which a start traces their programs: the longest to compile comes first. Programs
    with prompts have another kernel, and each variant does all the work of the variants before it."""
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
    pooling: Pooling | None = None  # pooling of embedding requests; None: there can be no such requests
    keeps_text: bool = False  # programs keep the tokens of every page, which drafts need
    max_loras: int = 0  # LoRA adapters that may run at once, in adapter slots 1 to max_loras; 0: there are no slots
    max_models: int = 0  # models whose weights may be on the device at once; 0: there is one model only
    page_bytes: int = 0  # bytes of one page's K/V in the host's memory; 0: pages cannot leave the device
    pages_of_copy: int = 0  # most pages of one `read_pages`, `stage_pages` or `write_pages`

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def pages_of_small_copy(self) -> int:
        return pages_of_small_copy(self.pages_of_copy)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The offsets of the sections in the packed buffer of one bucket. The host and the program both use them."""

    bucket: Bucket

    @property
    def num_patches(self) -> int:
        """The number of patches in the step's buffer. It is enough for every row to cross a page boundary and for a few
        short admissions. Further patches are in `StepInput.patches`, which are applied before the step."""
        return 2 * self.bucket.num_rows + 64

    def sections(self) -> dict[str, slice[int, int, None]]:
        """Name of a section -> its slice of the buffer. The sections are header, slots[S], q_lens[S], emits[S],
        tokens[T], patch_indices[K], patch_values[K], and targets[T] in programs that score.

        Decodes (q_len 1) are the first rows, and chunks follow. A padding row has slot == num_slots, q_len 0, emit 0. A
        token of -1 stands for the slot's last token, or for a draft after it. A padding patch has an index past the end
        of the state. targets[t] is the prompt token that follows tokens[t], or -1 if it is not to be scored.
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


MASK_BLOCK = 16  # rows of masks in one dispatch
PATCH_BLOCK = 4096  # (index, value) pairs in one dispatch of patches
MAX_STAGED_ADAPTERS = 2
SMALL_COPIES = 8  # this many small copies have as many pages as one large copy
MAX_PAGE_COPIES = 4  # most copies on their way to the host at a time, and most staged copies


def pages_of_small_copy(most: int) -> int:
    """The most pages of a small copy, which costs less than a copy of `most` pages, the most that a copy can have."""
    return max(1, most // SMALL_COPIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyReset:
    """The token history of a request with penalties. The device counts it when the request is admitted."""

    slot: int
    prompt: np.ndarray  # i32[n]
    output: np.ndarray  # i32[m]; not empty after a preemption


class WeightsKind(StrEnum):
    """The kinds of weights that come to the device while steps run."""

    ADAPTER = "LoRA adapter"
    MODEL = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWrite:
    """The weights of a staged LoRA adapter replace those in an adapter slot."""

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
    adapters: tuple[AdapterWrite, ...] = ()  # applied before the step; these adapters are then no longer staged
    model: int = 0  # the identity of the model of all rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The results of a step by row. The results of rows without emit are undefined.

    `D` is 1 + num_drafts. With drafts, a row has drawn 1 + num_accepted[row] tokens, and all except the last equal its
    drafts. In other steps it has drawn one token. The slot's LAST_TOKEN is the last drawn token, and its KV_LEN has
    grown by the number of drawn tokens.
    """

    tokens: np.ndarray  # i32[S, D]
    finite: np.ndarray  # bool[S]: False if the logits of one of the row's tokens held a NaN or infinity
    num_drafts: np.ndarray | None = None  # i32[S], proposed for the row; None: the program has no drafts
    num_accepted: np.ndarray | None = None  # i32[S]
    # bool[S]: whether the row's first token equals the row's first draft, or the draft that it would have had. All
    # programs with drafts return it. If drafts are looked up, programs for decodes only return it, too, if they have no
    # more rows than programs with drafts. Its values in these have a meaning only if the header says `looks_up`.
    would_accept: np.ndarray | None = None
    logprobs: np.ndarray | None = None  # f32[S, D], all but GREEDY
    ranks: np.ndarray | None = None  # i32[S, D], rank of the token: 1 for the most likely one
    top_ids: np.ndarray | None = None  # i32[S, D, MAX_LOGPROBS], most likely first
    top_logprobs: np.ndarray | None = None  # f32[S, D, MAX_LOGPROBS]
    sampled_logprobs: np.ndarray | None = None  # f32[S, D], all but GREEDY: under the distribution of the draw
    asked_logprobs: np.ndarray | None = None  # f32[S, D, MAX_LOGPROB_TOKEN_IDS], of the row's `logprob_token_ids`
    target_logprobs: np.ndarray | None = None  # f32[T], SCORE and EMBED: log-probability of targets[t]
    target_top_ids: np.ndarray | None = None  # i32[T, MAX_LOGPROBS]
    target_top_logprobs: np.ndarray | None = None  # f32[T, MAX_LOGPROBS]
    target_ranks: np.ndarray | None = None  # i32[T], rank of targets[t]: 1 for the most likely token
    pooled: np.ndarray | None = None  # f32[S, hidden_size], EMBED: hidden state of the last token, or sum over all


class StepHandle(Protocol):
    """A step that has been dispatched."""

    def result(self) -> StepOutput:
        """The output of the step. Blocks until the device is done. The reader thread calls it once."""


class PagesRead(Protocol):
    """Pages of the device whose K/V are on their way to the host."""

    def copy_to(self, pages: Sequence[np.ndarray]) -> None:
        """Copies the pages into `pages`, each u8[page_bytes], in the order of `read_pages`. Blocks until the device is
        done. It is called once, on the page mover's thread. Raises the device's error."""


class StagedPages(Protocol):
    """The K/V of pages that are on the device, but in no page yet."""


class Runner(Protocol):
    """Executes steps in the order of the calls. `model.execution.runner.ModelRunner` implements it."""

    def capacity(self) -> Capacity: ...

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> Collection[Bucket]:
        """Compiles the buckets' programs and runs each once. After this, `num_compiles` never changes.

        Returns the buckets of `may_wait` that it has left for `compile_later`, because compiling them takes long.
        """

    def compile_later(self, bucket: Bucket) -> None:
        """Compiles a program that `warm_up` has left. It does not count in `num_compiles`. A separate thread calls it
        for one bucket after the other while steps run."""

    def execute(self, step: StepInput) -> StepHandle:
        """Dispatches one step and returns at once. Raises KeyError if its bucket was not warmed up."""

    def stage(self, kind: WeightsKind, identity: int) -> None:
        """Copies the weights of a LoRA adapter or a model to the device. A later `AdapterWrite` copies an adapter into
        a slot. Later steps may be of the model. It blocks, so a separate thread for each kind calls it while steps run.
        At most `MAX_STAGED_ADAPTERS` adapters are staged at a time, and `max_models - 1` models besides model 0.

        Raises ValueError or OSError if the weights can no longer be read.
        """

    def drop(self, kind: WeightsKind, identity: int) -> None:
        """Frees the weights of a staged adapter that no step will write, or of a model that has no step in flight.
        Weights that are not there are ignored."""

    def read_pages(self, pages: Sequence[int]) -> PagesRead:
        """Dispatches a copy of these pages, at most `pages_of_copy`, to the host, and returns at once. Later steps may
        write to the pages. The thread that calls `execute` calls it, while fewer than `MAX_PAGE_COPIES` copies wait for
        `copy_to`."""

    def stage_pages(self, pages: Sequence[np.ndarray]) -> StagedPages:
        """Copies at most `pages_of_copy` pages, as `PagesRead.copy_to` gave them, to the device. It blocks until the
        arrays may change, so a separate thread calls it while steps run. At most `MAX_PAGE_COPIES` copies are staged at
        a time: the caller writes or drops each of them."""

    def write_pages(self, staged: StagedPages, pages: Sequence[int]) -> None:
        """Dispatches a copy of staged pages to `pages`, in the order of `stage_pages`, and returns at once. All `pages`
        differ, and there may be fewer of them. The thread that calls `execute` calls it once for each `staged`."""

    def recover(self) -> None:
        """Prepares the device for further steps after a failed one. No step may be in flight. Slot state, pages and
        adapter slots may be lost. Staged adapters and all models but model 0 may be lost; they are dropped later.

        Raises the device's error if the device cannot be used any more; the engine then dies.
        """

    @property
    def num_compiles(self) -> int: ...


assert MAX_LOGPROBS <= 32, "top-k of the log-probabilities is a small unrolled selection on some chips"
