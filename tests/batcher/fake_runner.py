"""A runner in numpy that honours the packed contract to the letter and checks everything that can be checked.

It keeps the same state as the device does, writes token ids where K/V would go, and "samples" a hash of the sampling
parameters in the slot, of the adapter in its adapter slot, and of the whole prefix *as read through the page table*: a
wrong page, slot, length, seed, adapter or a lost token changes the text. It also keeps which adapter has computed each
position of a page. Steps, and copies of pages between them, are executed in their order when a result is asked for, not
before, so that a host that touches a buffer after handing it over is found out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from weakref import WeakSet

import numpy as np

from batcher.grammar import num_mask_words
from batcher.request import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, Pooling, Request
from batcher.slots import SlotLayout
from batcher.step import (
    MASK_BLOCK,
    MAX_PAGE_COPIES,
    MAX_STAGED_ADAPTERS,
    PATCH_BLOCK,
    Bucket,
    Capacity,
    PackedLayout,
    StepHandle,
    StepInput,
    StepOutput,
    Variant,
    WeightsKind,
)
from tests.batcher.toy_grammar import ToyGrammars

POISON = -77  # in every position of a page that the present owner has not written
FAKE_HIDDEN = 4
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class ContractError(Exception):
    """The batcher broke the contract of batcher/step.py."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Everything that a token may depend on besides the prefix."""

    floats: tuple[float, ...]  # temperature, top_p, min_p, presence, frequency and repetition penalty, as float32
    top_k: int
    seed: int  # 64 bits, unsigned
    min_kv_len: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None  # by the mask
    adapter: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.floats[3:] != (0.0, 0.0, 1.0)

    def token(self, prefix: np.ndarray, history: Mapping[int, int], vocab_size: int) -> int:
        parts: list[object] = [self.bias]
        if self.floats[0] > 0:
            parts += [self.floats[:3], self.top_k, self.seed]
        if self.has_penalties:
            parts += [self.floats[3:], sorted(history.items())]
        base = blake2b(seen(prefix, self.adapter), digest_size=16)
        base.update(repr(parts).encode())
        if self.allowed is not None:
            open_ = [t for t in self.allowed if len(prefix) >= self.min_kv_len or t not in self.stop_ids]
            return open_[int.from_bytes(base.digest(), "little") % len(open_)]
        attempt = 0
        while True:
            digest = blake2b(base.digest() + bytes([attempt]), digest_size=8).digest()
            token = int.from_bytes(digest, "little") % vocab_size
            if len(prefix) >= self.min_kv_len or token not in self.stop_ids:
                return token
            attempt += 1


def seen(prefix: np.ndarray, adapter: int) -> bytes:
    """What hidden states depend on."""
    return prefix.astype(np.int32).tobytes() + (adapter.to_bytes(8, "little") if adapter else b"")


def mixed(adapter: int, model: int) -> int:
    """The weights of a row, in one number of 62 bits; an adapter alone is itself."""
    if not model:
        return adapter
    return int.from_bytes(blake2b(f"{adapter} {model}".encode(), digest_size=8).digest()) >> 2


def stop_ids_of(request: Request, eos_token_ids: tuple[int, ...]) -> set[int]:
    """An end that a grammar lets through is one, whatever `ignore_eos` says."""
    s = request.sampling
    return {*s.stop_token_ids, *(() if s.ignore_eos and s.grammar is None else eos_token_ids)}


def draw_of_request(request: Request, eos_token_ids: tuple[int, ...]) -> Draw:
    """What the slot state of `request` must say."""
    s = request.sampling
    numbers = (s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    stop_ids = stop_ids_of(request, eos_token_ids)
    assert s.seed is not None, "a test that predicts tokens gives the seed"
    return Draw(
        floats=tuple(float(np.float32(x)) for x in numbers),
        top_k=s.top_k,
        seed=s.seed % 2**64,
        min_kv_len=len(request.prompt) + s.min_tokens if s.min_tokens else 0,
        stop_ids=tuple(sorted(stop_ids)) if s.min_tokens else (),
        bias=tuple((token, float(np.float32(bias))) for token, bias in s.logit_bias),
        adapter=mixed(request.adapter, request.model),
    )


def expected_tokens(request: Request, capacity: Capacity, eos_token_ids: tuple[int, ...]) -> list[int]:
    """What the engine must generate, whoever shares the steps: from the request alone."""
    s, draw = request.sampling, draw_of_request(request, eos_token_ids)
    stop_ids = stop_ids_of(request, eos_token_ids)
    tokens = list(request.prompt)
    history = Counter(tokens)
    output: list[int] = []
    allowed = range(capacity.vocab_size) if s.allowed_token_ids is None else sorted(set(s.allowed_token_ids))
    if s.allowed_token_ids is not None:
        draw = replace(draw, allowed=tuple(allowed))
    matcher = None if s.grammar is None else ToyGrammars(capacity.vocab_size).matcher(s.grammar)
    drawn: tuple[int, ...] = ()
    while len(output) < s.max_tokens and len(tokens) < capacity.max_model_len:
        if matcher is not None:
            permit = matcher.advance(drawn)
            if permit.is_over:
                break
        if matcher is not None or s.bad_words:
            free = allowed if matcher is None else [t for t in matcher.allowed() if t in allowed]
            draw = replace(draw, allowed=tuple(t for t in free if not completes(s.bad_words, [*output, t])))
        token = draw.token(np.array(tokens), history, capacity.vocab_size)
        drawn = (token,)
        tokens.append(token)
        output.append(token)
        history[token] += 1
        if token in stop_ids and len(output) >= s.min_tokens:
            break
    return output


def completes(words: Iterable[tuple[int, ...]], output: list[int]) -> bool:
    """Whether the output ends with one of the words."""
    return any(tuple(output[-len(word) :]) == word for word in words)


def fake_logprob(prefix: np.ndarray, token: int) -> float:
    digest = blake2b(prefix.astype(np.int32).tobytes() + token.to_bytes(4, "little"), digest_size=2).digest()
    return float(np.float32(-int.from_bytes(digest, "little") / 1000))


def fake_sampled_logprob(prefix: np.ndarray, token: int) -> float:
    return float(np.float32(fake_logprob(prefix, token) / 2))


def fake_hidden(prefix: np.ndarray, adapter: int) -> np.ndarray:
    """f32[FAKE_HIDDEN], of the last token of a prefix."""
    digest = blake2b(seen(prefix, adapter), digest_size=FAKE_HIDDEN).digest()
    return np.frombuffer(digest, np.uint8).astype(np.float32) - 128


def fake_pooled(prefix: np.ndarray, start: int, pooling: Pooling | None, adapter: int) -> np.ndarray:
    """Of a row that has computed `prefix[start:]` in a step."""
    if pooling is Pooling.LAST:
        return fake_hidden(prefix, adapter)
    return sum(fake_hidden(prefix[: stop + 1], adapter) for stop in range(start, len(prefix)))


def expected_embedding(request: Request, pooling: Pooling) -> np.ndarray:
    """f32[FAKE_HIDDEN], from the request alone."""
    pooled = fake_pooled(np.array(request.prompt), 0, pooling, mixed(request.adapter, request.model)).astype(np.float64)
    return (pooled / np.linalg.norm(pooled)).astype(np.float32)


# (the known tokens, the next tokens that will be drawn i32[k]) -> the drafts, at most k
Proposal = Callable[[np.ndarray, list[int]], list[int]]


def fake_page_bytes(page_size: int) -> int:
    """`Capacity.page_bytes`: of each position its token, i32, and the adapter that has computed it, i64."""
    return page_size * (4 + 8)


class FakeRunner:
    """`on_result(number)` runs before a step's result is given: a test may block in it, or raise. A copy of pages that
    is asked for runs the steps before it, too."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        on_execute: Callable[[int], None] | None = None,
        on_result: Callable[[int], None] | None = None,
        nan_token: int | None = None,  # a row with this token in its prefix gives NaN
        healthy: bool = True,  # whether recover() succeeds
        propose: Proposal | None = None,  # of speculative steps
        tells_would_accept: bool = True,  # as if drafts were looked up: rows without drafts tell of the first one
        on_compile: Callable[[Bucket], None] | None = None,  # before a program that was left for later is there
        on_stage: Callable[[int], None] | None = None,  # before an adapter is staged
        on_copy: Callable[[str], None]
        | None = None,  # before "read" pages are given, and others are brought to "stage"
    ) -> None:
        self._capacity = capacity
        self.width = SlotLayout.width(capacity.pages_per_seq)
        self.violations: list[str] = []
        self.executed: list[Bucket] = []
        self.steps: list[StepInput] = []  # as they were handed over
        self.num_recoveries = 0
        self.healthy = healthy
        self._on_execute = on_execute
        self._on_result = on_result
        self._nan_token = nan_token
        self._propose = propose
        self._tells_would_accept = tells_would_accept
        self._on_compile = on_compile
        self._on_stage = on_stage
        self._on_copy = on_copy
        self.num_staged = self.num_brought = 0  # adapters, and models, since the start
        self.models = {0}  # on the device
        self.num_lookups = 0  # steps without drafts that were asked whether the first ones would have been right
        self._warm: set[Bucket] = set()
        self.compiled_later: list[Bucket] = []
        self._pending: list[_Handle | _PagesRead | _PagesWrite] = []  # in their order, and not executed yet
        self._unread: list[_Handle] = []  # steps whose results are not asked for yet
        self._running = threading.Lock()  # steps are executed
        self._reads: WeakSet[_PagesRead] = WeakSet()  # that are not copied yet
        self._staged_pages: WeakSet[_StagedPages] = WeakSet()  # that are not written yet
        self.num_read_pages = self.num_written_pages = 0
        self._num_attempts = 0
        self._is_lost = False
        self._wipe()

    def _wipe(self) -> None:
        c = self._capacity
        self.state = np.full((c.num_slots, self.width), POISON, np.int32)
        self.pages = np.full((c.num_pages + 1, c.page_size), POISON, np.int32)
        self.masks = np.full((c.num_slots, num_mask_words(c.vocab_size)), POISON, np.int32)
        self.computed_by = np.full((c.num_pages + 1, c.page_size), POISON, np.int64)  # adapters
        self.adapters = [0] + [POISON] * c.max_loras  # by adapter slot
        self.staged: set[int] = set()
        self.brought: set[int] = set()
        self.history: list[Counter[int]] = [Counter() for _ in range(c.num_slots)]

    # --- the protocol ---

    def capacity(self) -> Capacity:
        return self._capacity

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> list[Bucket]:
        self._warm.update(set(buckets) - set(may_wait))
        report(f"{len(self._warm)} buckets")
        return list(may_wait)

    def compile_later(self, bucket: Bucket) -> None:
        if self._on_compile is not None:
            self._on_compile(bucket)
        self.compiled_later.append(bucket)

    def execute(self, step: StepInput) -> StepHandle:
        attempt, self._num_attempts = self._num_attempts, self._num_attempts + 1
        if self._on_execute is not None:
            self._on_execute(attempt)
        if step.bucket not in self._warm and step.bucket not in self.compiled_later:
            self._fail(f"no program for {step.bucket}")
        for write in step.adapters:
            if write.adapter not in self.staged or not 1 <= write.slot <= self._capacity.max_loras:
                self._fail(f"{write} of {self.staged} staged adapters")
            self.staged.remove(write.adapter)
        if step.model not in self.models:
            self._fail(f"a step of the model {step.model}, and {self.models} are on the device")
        handle = _Handle(self, step, len(self.executed))
        self.executed.append(step.bucket)
        self.steps.append(step)
        self._unread.append(handle)
        self._pending.append(handle)
        return handle

    def stage(self, kind: WeightsKind, adapter: int) -> None:
        if self._on_stage is not None:
            self._on_stage(adapter)
        if kind is WeightsKind.MODEL:
            self.models.add(adapter)
            self.num_brought += 1
            if len(self.models) > self._capacity.max_models:
                self._fail(f"too many models are on the device: {self.models}")
            return
        self.staged.add(adapter)
        self.num_staged += 1
        if len(self.staged) > MAX_STAGED_ADAPTERS:
            self._fail(f"too many adapters are staged: {self.staged}")

    def drop(self, kind: WeightsKind, adapter: int) -> None:
        if kind is WeightsKind.MODEL:
            if any(handle.step.model == adapter for handle in self._unread):
                self._fail(f"the model {adapter} has steps in flight")
            self.models.discard(adapter)
        else:
            self.staged.discard(adapter)

    def read_pages(self, pages: Sequence[int]) -> _PagesRead:
        self._check_copy(pages)
        read = _PagesRead(self, list(pages))
        self._reads.add(read)
        if len(self._reads) > MAX_PAGE_COPIES:
            self._fail(f"{len(self._reads)} copies are on their way to the host")
        self._pending.append(read)
        return read

    def stage_pages(self, pages: Sequence[np.ndarray]) -> _StagedPages:
        if self._on_copy is not None:
            self._on_copy("stage")
        self._check_bytes(pages)
        staged = _StagedPages([page.copy() for page in pages])
        self._staged_pages.add(staged)
        if len(self._staged_pages) > MAX_PAGE_COPIES:
            self._fail(f"{len(self._staged_pages)} copies are staged")
        return staged

    def write_pages(self, staged: _StagedPages, pages: Sequence[int]) -> None:
        self._check_copy(pages)
        if staged not in self._staged_pages or len(pages) > len(staged.content):
            self._fail(f"{len(staged.content)} staged pages are written to {pages}, or for a second time")
        self._staged_pages.discard(staged)
        self._pending.append(_PagesWrite(self, staged.content, list(pages)))

    def recover(self) -> None:
        if self._unread:
            self._fail("recovered while steps are in flight")
        if not self.healthy:
            raise RuntimeError("the device is gone")
        if self._pending:
            with self._running:
                self._run_up_to(self._pending[-1])
        self.num_recoveries += 1
        self._is_lost = False
        self._wipe()

    @property
    def num_compiles(self) -> int:
        return len(self._warm)

    # --- execution ---

    def _run_up_to(self, last: _Handle | _PagesRead | _PagesWrite) -> None:
        """All that was handed over, in its order, up to this."""
        while last in self._pending:
            self._pending.pop(0).run()

    def _check_state(self) -> None:
        if self._is_lost:
            raise RuntimeError("the state went with a step before this one")

    def _run_next(self, handle: _Handle) -> StepOutput:
        if self._on_result is not None:
            try:
                self._on_result(handle.number)
            except Exception:
                self._is_lost = True  # as with buffers that were donated to a step that failed
                raise
        self._check_state()
        return self._run(handle.step)

    def _content_of(self, page: int) -> bytes:
        if (self.pages[page] == POISON).any():
            self._fail(f"page {page} is read, and only a part of it is written: {self.pages[page]}")
        return self.pages[page].tobytes() + self.computed_by[page].tobytes()

    def _put(self, page: int, content: np.ndarray) -> None:
        split = self.pages[page].nbytes
        self.pages[page] = content[:split].view(np.int32)
        self.computed_by[page] = content[split:].view(np.int64)

    def _check_copy(self, pages: Sequence[int]) -> None:
        c = self._capacity
        if not c.page_bytes or not 0 < len(pages) <= c.pages_of_copy or len(set(pages)) != len(pages):
            self._fail(f"a copy of the pages {pages}: {c}")
        if not all(1 <= page <= c.num_pages for page in pages):
            self._fail(f"a copy of the pages {pages}, of {c.num_pages}")

    def _check_bytes(self, pages: Sequence[np.ndarray]) -> None:
        c = self._capacity
        if c.page_bytes != fake_page_bytes(c.page_size) or not 0 < len(pages) <= c.pages_of_copy:
            self._fail(f"a copy of {len(pages)} pages: {c}")
        if any(page.dtype != np.uint8 or page.shape != (c.page_bytes,) for page in pages):
            self._fail(f"a page of {[(page.dtype, page.shape) for page in pages]}, not u8[{c.page_bytes}]")

    def _run(self, step: StepInput) -> StepOutput:
        c, bucket = self._capacity, step.bucket
        self._model = step.model
        layout = PackedLayout(bucket)
        if step.packed.dtype != np.int32 or step.packed.shape != (layout.size,):
            self._fail(f"packed buffer: {step.packed.dtype} {step.packed.shape} for {bucket}")
        part = {name: step.packed[where] for name, where in layout.sections().items()}
        for write in step.adapters:
            self.adapters[write.slot] = write.adapter
        for block in step.patches:
            if block.shape != (2, PATCH_BLOCK) or block.dtype != np.int32:
                self._fail(f"patch block: {block.shape} {block.dtype}")
            self._apply(block[0], block[1])
        self._apply(part["patch_indices"], part["patch_values"])
        for block in step.masks:
            if block.shape != (MASK_BLOCK, 1 + self.masks.shape[1]) or block.dtype != np.int32:
                self._fail(f"mask block: {block.shape} {block.dtype}")
            for slot in set(block[:, 0].tolist()) - {c.num_slots}:
                self.masks[slot] = block[block[:, 0] == slot, 1:]
                self.brought.add(slot)
        for reset in step.penalty_resets:
            self.history[reset.slot] = Counter([*reset.prompt.tolist(), *reset.output.tolist()])

        num_singles, num_rows, num_tokens, looks_up = part["header"][:4].tolist()
        self.num_lookups += looks_up
        slots, q_lens, emits = part["slots"], part["q_lens"], part["emits"]
        self._check_rows(bucket, num_singles, num_rows, num_tokens, slots, q_lens, emits)
        out = _Output(bucket, tells_would_accept=bucket.num_drafts > 0 or (c.keeps_text and self._tells_would_accept))
        start = 0
        touched: list[tuple[set[int], set[int]]] = []
        for row in range(num_rows):
            slot, q_len = int(slots[row]), int(q_lens[row])
            tokens = part["tokens"][start : start + q_len].astype(np.int64)
            drafts, first = [], []
            kv_len = int(self.state[slot, SlotLayout.KV_LEN])
            table = self.state[slot, SlotLayout.PAGE_TABLE :]
            adapter = self._adapter(slot)
            if adapter and (adapter == POISON or not bucket.has_adapters):
                self._fail(f"slot {slot} runs with the adapter {adapter} in {bucket}")
            adapter = mixed(adapter, step.model)
            # a row that only embeds draws nothing, and may fill the context
            if not 0 <= kv_len <= kv_len + q_len < c.max_model_len + (bucket.variant is Variant.EMBED):
                self._fail(f"slot {slot} of length {kv_len} grows by {q_len}")
            if bucket.num_drafts:
                if (tokens != -1).any() or not emits[row]:
                    self._fail(f"slot {slot} is fed {tokens} in a speculative step")
                first = self._drafts(slot, kv_len, max(q_len - 1, int(self._tells_would_accept)))
                drafts = first[: q_len - 1]
                tokens = np.array([self.state[slot, SlotLayout.LAST_TOKEN], *drafts, *[0] * q_len])[:q_len]
            elif tokens.tolist() == [-1]:
                first = self._drafts(slot, kv_len, int(self._tells_would_accept))
                tokens[0] = self.state[slot, SlotLayout.LAST_TOKEN]
            if ((tokens < 0) | (tokens >= c.vocab_size)).any():
                self._fail(f"slot {slot} is fed {tokens}")
            pages = table[: -(-(kv_len + q_len) // c.page_size)]
            if ((pages < 1) | (pages > c.num_pages)).any() or len(set(pages.tolist())) != len(pages):
                self._fail(f"slot {slot} has the pages {pages}")
            for i, token in enumerate(tokens.tolist()):
                position = kv_len + i
                page, offset = int(table[position // c.page_size]), position % c.page_size
                if offset == 0:
                    self.pages[page] = POISON
                elif self.pages[page, offset - 1] == POISON:
                    self._fail(f"slot {slot} writes page {page} at {offset} after a gap")
                self.pages[page, offset] = token
                self.computed_by[page, offset] = adapter
            first_written = kv_len // c.page_size
            touched.append((set(pages[:first_written].tolist()), set(pages[first_written:].tolist())))
            prefix = self.pages[pages].reshape(-1)[: kv_len + q_len]
            if (self.computed_by[pages].reshape(-1)[: kv_len + q_len] != adapter).any():
                self._fail(f"slot {slot} reads what another adapter than {adapter} has computed: pages {pages}")
            if (prefix == POISON).any():
                self._fail(f"slot {slot} reads what was never written: pages {pages}")
            if emits[row] and self.state[slot, SlotLayout.at("has_mask")] and slot not in self.brought:
                self._fail(f"slot {slot} draws with a mask that was never brought")
            if bucket.num_drafts:
                prefix = self._verify(out, row, slot, prefix[: kv_len + 1], drafts)
            elif emits[row]:
                self._emit(out, row, slot, prefix)
            is_told = bool(looks_up or bucket.num_drafts)  # otherwise the value means nothing
            out.would_accept[row] = first[:1] == [int(out.tokens[row, 0])] or not is_told
            self.state[slot, SlotLayout.KV_LEN] = len(prefix)
            if self._nan_token is not None and self._nan_token in prefix:
                out.finite[row] = False
            if bucket.variant is Variant.EMBED:
                out.pooled[row] = fake_pooled(prefix, kv_len, c.pooling, adapter)
            if bucket.variant.scores:
                self._score(out, part["targets"], start, kv_len, prefix)
            start += q_len
        written = [page for _, pages in touched for page in pages]
        if len(set(written)) != len(written) or any(page in reads for reads, _ in touched for page in written):
            self._fail("a page is written by one row and touched by another in the same step")
        return out.result()

    def _drafts(self, slot: int, kv_len: int, most: int) -> list[int]:
        if not most or self._propose is None:
            return []
        known, coming = self._known(slot, kv_len), self._coming(slot, kv_len, most)
        return self._propose(known, coming)[:most]

    def _known(self, slot: int, kv_len: int) -> np.ndarray:
        table = self.state[slot, SlotLayout.PAGE_TABLE :]
        known = self.pages[table[: -(-kv_len // self._capacity.page_size)]].reshape(-1)[:kv_len]
        return np.append(known, self.state[slot, SlotLayout.LAST_TOKEN])

    def _coming(self, slot: int, kv_len: int, most: int) -> list[int]:
        """The next tokens that the row will draw."""
        known, draw, history = self._known(slot, kv_len), self._draw(slot), self.history[slot].copy()
        coming: list[int] = []
        for _ in range(most):
            coming.append(draw.token(np.append(known, coming), history, self._capacity.vocab_size))
            history[coming[-1]] += 1
        return coming

    def _verify(self, out: _Output, row: int, slot: int, prefix: np.ndarray, drafts: list[int]) -> np.ndarray:
        """Draws until a token differs from its draft. Returns what was computed of the drawn tokens."""
        out.num_drafts[row], out.num_accepted[row] = len(drafts), 0
        self._emit(out, row, slot, prefix)
        for place, draft in enumerate(drafts):
            if out.tokens[row, place] != draft:
                break
            out.num_accepted[row] += 1
            prefix = np.append(prefix, draft)
            self._emit(out, row, slot, prefix, place + 1)
        return prefix

    def _emit(self, out: _Output, row: int, slot: int, prefix: np.ndarray, place: int = 0) -> None:
        draw = self._draw(slot)
        wants_logprobs = bool(self.state[slot, SlotLayout.at("wants_logprobs")])
        wants_sampled = bool(self.state[slot, SlotLayout.at("wants_sampled_logprobs")])
        plain = draw.floats[0] == 0 and not draw.has_penalties and not draw.bias and draw.allowed is None
        banned = bool(draw.stop_ids) and len(prefix) < draw.min_kv_len
        if out.bucket.variant is Variant.GREEDY and not (
            plain and not banned and not wants_logprobs and not wants_sampled
        ):
            self._fail(f"slot {slot} cannot be drawn by a GREEDY program: {draw}")
        token = draw.token(prefix, self.history[slot], self._capacity.vocab_size)
        self.state[slot, SlotLayout.LAST_TOKEN] = token
        self.history[slot][token] += 1
        out.tokens[row, place] = token
        out.logprobs[row, place] = fake_logprob(prefix, token)
        out.ranks[row, place] = 1 + token
        asked = self.state[slot, SlotLayout.at("logprob_token_ids") :][:MAX_LOGPROB_TOKEN_IDS]
        if wants_logprobs:
            out.asked_logprobs[row, place] = [fake_logprob(prefix, max(0, int(id))) for id in asked]
        out.sampled_logprobs[row, place] = fake_sampled_logprob(prefix, token) if wants_sampled else 0
        out.top_ids[row, place] = np.arange(MAX_LOGPROBS)
        out.top_logprobs[row, place] = [fake_logprob(prefix, i) for i in range(MAX_LOGPROBS)] if wants_logprobs else 0

    def _score(self, out: _Output, targets: np.ndarray, start: int, kv_len: int, prefix: np.ndarray) -> None:
        for position in range(kv_len, len(prefix)):
            t = start + position - kv_len
            if targets[t] >= 0:
                seen = prefix[: position + 1]
                out.target_logprobs[t] = fake_logprob(seen, int(targets[t]))
                out.target_ranks[t] = 1 + position
                out.target_top_ids[t] = np.arange(MAX_LOGPROBS)
                out.target_top_logprobs[t] = [fake_logprob(seen, i) for i in range(MAX_LOGPROBS)]

    def _adapter(self, slot: int) -> int:
        return self.adapters[self.state[slot, SlotLayout.ADAPTER]]

    def _draw(self, slot: int) -> Draw:
        row, col = self.state[slot], SlotLayout.at
        bits = row[[col(name) for name in FLOATS]].view(np.float32)
        n_stop, n_bias = int(row[col("num_stop_ids")]), int(row[col("num_bias")])
        ids = row[col("bias_ids") : col("bias_ids") + n_bias].tolist()
        values = row[col("bias_values") : col("bias_values") + n_bias].view(np.float32).tolist()
        bits_allowed = np.unpackbits(self.masks[slot].view(np.uint8), bitorder="little")
        low, high = row[[col("seed"), col("seed") + 1]].view(np.uint32).tolist()
        return Draw(
            floats=tuple(bits.tolist()),
            top_k=int(row[col("top_k")]),
            seed=low | high << 32,
            min_kv_len=int(row[col("min_kv_len")]),
            stop_ids=tuple(sorted(row[col("stop_ids") : col("stop_ids") + n_stop].tolist())),
            bias=tuple(zip(ids, values, strict=True)),
            allowed=tuple(np.flatnonzero(bits_allowed).tolist()) if row[col("has_mask")] else None,
            adapter=mixed(self._adapter(slot), self._model),
        )

    def _apply(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Patches, with drop semantics past the end."""
        kept = indices < self.state.size
        if (indices < 0).any() or len(set(indices[kept].tolist())) != kept.sum():
            self._fail("a patch has a negative or a repeated index")
        self.state.reshape(-1)[indices[kept]] = values[kept]

    def _check_rows(
        self,
        bucket: Bucket,
        num_singles: int,
        num_rows: int,
        num_tokens: int,
        slots: np.ndarray,
        q_lens: np.ndarray,
        emits: np.ndarray,
    ) -> None:
        real = slots[:num_rows].tolist()
        checks = {
            "counts": 0 <= num_singles <= num_rows <= bucket.num_rows and num_rows >= 1,
            "tokens": num_tokens == q_lens.sum() <= bucket.num_tokens,
            "single-token rows first": (q_lens[:num_singles] == 1).all() and (q_lens[num_singles:num_rows] > 1).all(),
            "decode-only": not bucket.decode_only or num_singles == num_rows,
            "slots": all(0 <= slot < self._capacity.num_slots for slot in real) and len(set(real)) == num_rows,
            "padding": (slots[num_rows:] == self._capacity.num_slots).all()
            and not q_lens[num_rows:].any()
            and not emits[num_rows:].any(),
            "emits": set(emits.tolist()) <= {0, 1},
            "drafts": not bucket.num_drafts or q_lens.max() <= 1 + bucket.num_drafts,
        }
        for name, holds in checks.items():
            if not holds:
                self._fail(f"{name}: {bucket} {num_singles=} {num_rows=} {num_tokens=} {slots} {q_lens} {emits}")

    def _fail(self, message: str) -> None:
        self.violations.append(message)
        raise ContractError(message)


class _Handle:
    def __init__(self, runner: FakeRunner, step: StepInput, number: int) -> None:
        self._runner = runner
        self.step = step
        self.number = number
        self._output: StepOutput
        self._error: Exception | None = None

    def result(self) -> StepOutput:
        runner = self._runner
        if self is not runner._unread[0]:
            runner._fail("results are asked for out of order")
        with runner._running:
            runner._run_up_to(self)
        runner._unread.pop(0)
        if self._error is not None:
            raise self._error
        return self._output

    def run(self) -> None:
        try:
            self._output = self._runner._run_next(self)
        except Exception as error:
            self._error = error


class _PagesRead:
    def __init__(self, runner: FakeRunner, pages: list[int]) -> None:
        self._runner = runner
        self._pages = pages
        self._content: list[bytes] = []
        self._error: Exception | None = None

    def copy_to(self, pages: Sequence[np.ndarray]) -> None:
        runner = self._runner
        if runner._on_copy is not None:
            runner._on_copy("read")
        runner._check_bytes(pages)
        if self not in runner._reads or len(pages) != len(self._pages):
            runner._fail(f"the pages {self._pages} are copied to {len(pages)}, or for a second time")
        with runner._running:
            runner._run_up_to(self)
        runner._reads.discard(self)
        if self._error is not None:
            raise self._error
        runner.num_read_pages += len(pages)
        for page, content in zip(pages, self._content, strict=True):
            page[:] = np.frombuffer(content, np.uint8)

    def run(self) -> None:
        try:
            self._runner._check_state()
            self._content = [self._runner._content_of(page) for page in self._pages]
        except Exception as error:
            self._error = error


class _StagedPages:
    def __init__(self, content: list[np.ndarray]) -> None:
        self.content = content


class _PagesWrite:
    def __init__(self, runner: FakeRunner, content: list[np.ndarray], pages: list[int]) -> None:
        self._runner = runner
        self._content = content
        self._pages = pages

    def run(self) -> None:
        for page, content in zip(self._pages, self._content, strict=False):
            self._runner._put(page, content)
        self._runner.num_written_pages += len(self._pages)


class _Output:
    def __init__(self, bucket: Bucket, *, tells_would_accept: bool) -> None:
        self.tells_would_accept = tells_would_accept
        t, s = bucket.num_tokens, bucket.num_rows
        self.bucket = bucket
        d = 1 + bucket.num_drafts
        self.tokens = np.full((s, d), POISON, np.int32)
        self.num_drafts = np.full(s, POISON, np.int32)
        self.num_accepted = np.full(s, POISON, np.int32)
        self.would_accept = np.zeros(s, bool)
        self.finite = np.ones(s, bool)
        self.logprobs = np.full((s, d), np.nan, np.float32)
        self.top_ids = np.full((s, d, MAX_LOGPROBS), POISON, np.int32)
        self.top_logprobs = np.full((s, d, MAX_LOGPROBS), np.nan, np.float32)
        self.ranks = np.full((s, d), POISON, np.int32)
        self.asked_logprobs = np.full((s, d, MAX_LOGPROB_TOKEN_IDS), np.nan, np.float32)
        self.sampled_logprobs = np.full((s, d), np.nan, np.float32)
        self.target_logprobs = np.full(t, np.nan, np.float32)
        self.target_top_ids = np.full((t, MAX_LOGPROBS), POISON, np.int32)
        self.target_top_logprobs = np.full((t, MAX_LOGPROBS), np.nan, np.float32)
        self.target_ranks = np.full(t, POISON, np.int32)
        self.pooled = np.full((s, FAKE_HIDDEN), np.nan, np.float32)

    def result(self) -> StepOutput:
        common = {"tokens": self.tokens, "finite": self.finite}
        if self.tells_would_accept and (self.bucket.num_drafts or self.bucket.decode_only):
            common["would_accept"] = self.would_accept
        if self.bucket.num_drafts:
            common |= {"num_drafts": self.num_drafts, "num_accepted": self.num_accepted}
        if self.bucket.variant is Variant.GREEDY:
            return StepOutput(**common)
        rows = {"logprobs": self.logprobs, "top_ids": self.top_ids, "top_logprobs": self.top_logprobs}
        rows |= {"sampled_logprobs": self.sampled_logprobs, "ranks": self.ranks, "asked_logprobs": self.asked_logprobs}
        if self.bucket.variant is Variant.EMBED:
            rows["pooled"] = self.pooled
        if self.bucket.variant.scores:
            rows["target_logprobs"] = self.target_logprobs
            rows["target_top_ids"] = self.target_top_ids
            rows["target_top_logprobs"] = self.target_top_logprobs
            rows["target_ranks"] = self.target_ranks
        return StepOutput(**common, **rows)
