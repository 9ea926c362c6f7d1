"""The ladders of padded shapes. Both limits are rungs, so every legal step has a program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from dataclasses import dataclass, replace

from batcher.step import Bucket, Capacity, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig:
    """The spacing of the ladders: a finer ladder pads less and compiles more programs."""

    max_num_batched_tokens: int
    max_num_seqs: int
    min_decode_rows: int = 1  # rows of the smallest decode program; raise it where one row costs as much as several
    decode_rungs_apart: int = 2  # a decode program has at most so many times the rows of the next smaller one
    min_mixed_tokens: int = 16  # tokens of the smallest program that takes prompt tokens
    half_steps: bool = True  # also 1.5 times each power of two
    min_half_step: int = 64  # of the smallest power of two that has a half step
    few_rows: int | None = 8  # each mixed T also has a program of about so many rows, for light loads; None: it has not
    embeds: bool = False  # there are programs that pool hidden states
    num_drafts: int = 0  # per row, of speculative programs; 0: there are none
    max_draft_rows: int = 0  # rows of the largest speculative program
    adapters: bool = False  # each program has a second one, whose rows may have LoRA adapters

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"at least one row: {self.max_num_seqs=}")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                "a step must take one token of every running request and at least one prompt token besides: "
                f"{self.max_num_batched_tokens=} must exceed {self.max_num_seqs=}"
            )
        few_rows = 1 if self.few_rows is None else self.few_rows
        if min(self.min_decode_rows, self.min_mixed_tokens, few_rows) < 1:
            raise ValueError(
                f"smallest shapes are positive: {self.min_decode_rows=} {self.min_mixed_tokens=} {self.few_rows=}"
            )
        if self.decode_rungs_apart < 2:
            raise ValueError(f"rungs differ: {self.decode_rungs_apart=}")
        if self.num_drafts < 0 or (self.num_drafts > 0) != (self.max_draft_rows > 0):
            raise ValueError(f"speculation has drafts and rows: {self.num_drafts=} {self.max_draft_rows=}")
        if self.max_draft_rows * (1 + self.num_drafts) > self.max_num_batched_tokens:
            raise ValueError(
                "a speculative step must be within the limit of all steps: "
                f"{self.max_draft_rows=} {self.num_drafts=} {self.max_num_batched_tokens=}"
            )

    def check(self, capacity: Capacity) -> None:
        """Raises ValueError if a runner of this capacity cannot run every step."""
        if self.max_num_seqs > capacity.num_slots:
            raise ValueError(f"more rows than slots: {self.max_num_seqs=} {capacity.num_slots=}")
        if self.max_num_batched_tokens > capacity.max_num_batched_tokens:
            raise ValueError(
                f"steps longer than the runner takes: {self.max_num_batched_tokens=} {capacity.max_num_batched_tokens=}"
            )
        if self.num_drafts and not capacity.keeps_text:
            raise ValueError(f"the runner keeps no text to take drafts from: {self.num_drafts=}")
        if self.embeds != (capacity.pooling is not None):
            raise ValueError(f"one of runner and ladder embeds: {capacity.pooling=} {self.embeds=}")
        if self.adapters != (capacity.max_loras > 0):
            raise ValueError(f"one of runner and ladder has adapters: {capacity.max_loras=} {self.adapters=}")


_EMBED_STRIDE = 2  # a program for every fourfold of tokens
_LIGHT_TOKENS = 64  # tokens of a step with a short prompt


class BucketLadder:
    """All buckets, and the choice among them.

    Decode-only buckets (T == S): rungs up to `max_num_seqs`. Mixed buckets: a ladder of T, each with S of the
    most rows of the row ladder that are fewer than T (T == S would mean decode-only), and of `few_rows` if it is given.

    Every program costs seconds of start-up. Mixed steps have no GREEDY program: when no row samples, SAMPLE's extra
    work is skipped at run time and costs nothing next to the prompt's matrix products. SCORE exists only at both
    limits: it is rare, and its programs are heavy. EMBED has every `_EMBED_STRIDE`-th T from the largest down, with the
    most rows of each. Speculative buckets have powers of two up to their limit, in both variants. With `adapters` each
    of these buckets exists twice. A step takes the bucket with `has_adapters` if one of its rows has an adapter; other
    steps are faster in the bucket without.
    """

    def __init__(self, config: BucketConfig) -> None:
        self.config = config
        self._decode = _powers(config.min_decode_rows, config.max_num_seqs, config.decode_rungs_apart)
        tokens = _powers(config.min_mixed_tokens, config.max_num_batched_tokens)
        if config.half_steps:
            halves = {
                t + t // 2 for t in tokens if t >= config.min_half_step and t + t // 2 < config.max_num_batched_tokens
            }
            tokens = sorted({*tokens, *halves})
        rows = _powers(1, config.max_num_seqs)
        self._mixed: list[tuple[int, list[int]]] = []
        few_rows = config.max_num_seqs if config.few_rows is None else config.few_rows
        for t in tokens:
            fitting = [s for s in rows if s < t]
            if fitting:
                few = [s for s in rows if few_rows <= s < fitting[-1]][:1]
                self._mixed.append((t, [*few, fitting[-1]]))
        self._tokens = [t for t, _ in self._mixed]
        thinned = _powers(config.min_mixed_tokens, config.max_num_batched_tokens)[::-_EMBED_STRIDE]
        each = _powers(config.min_decode_rows, config.max_num_seqs)
        self._draft_rows = [s for s in each if s <= config.max_draft_rows]
        self._embed = sorted(Bucket(t, min(config.max_num_seqs, t - 1), Variant.EMBED) for t in thinned if t > 1)
        self._score = Bucket(config.max_num_batched_tokens, config.max_num_seqs, Variant.SCORE)
        self._buckets = self._all()

    def buckets(self) -> list[Bucket]:
        """All buckets, the cheapest first."""
        return list(self._buckets)

    def _all(self) -> list[Bucket]:
        decodes = [Bucket(s, s, variant) for variant in (Variant.GREEDY, Variant.SAMPLE) for s in self._decode]
        mixed = [Bucket(t, s, Variant.SAMPLE) for t, rows in self._mixed for s in rows]
        drafts = [self._with_drafts(s, v) for v in (Variant.GREEDY, Variant.SAMPLE) for s in self._draft_rows]
        plain = [*decodes, *mixed, *drafts, self._score, *(self._embed if self.config.embeds else ())]
        return sorted([*plain, *map(_with_adapters, plain)] if self.config.adapters else plain)

    def needed_first(self) -> list[Bucket]:
        """Buckets for a start: they hold every legal step of any variant, with adapters and without, and a few requests
        do not pay for the largest shapes."""
        rows, fewest = self._decode[-1], self._decode[0]
        light = min((t for t in self._tokens if t >= _LIGHT_TOKENS), default=self._tokens[-1])
        needed = {Bucket(rows, rows, Variant.SAMPLE), Bucket(fewest, fewest, Variant.SAMPLE)}
        needed.add(Bucket(light, dict(self._mixed)[light][0], Variant.SAMPLE))
        needed.add(self._embed[-1] if self.config.embeds else self._score)
        if self._draft_rows:
            needed.add(self._with_drafts(self._draft_rows[-1], Variant.SAMPLE))
        return sorted(map(_with_adapters, needed) if self.config.adapters else needed)

    def fallback(self, bucket: Bucket, missing: Container[Bucket]) -> Bucket:
        """The smallest bucket that is not `missing` and whose program computes every step of `bucket`.

        Raises ValueError if there is none. There is one if the buckets of `needed_first` are not missing.
        """
        fitting = [other for other in self._buckets if other not in missing and _holds(other, bucket)]
        if not fitting:
            raise ValueError(f"there is no fallback for {bucket}: one of needed_first is missing")
        return min(fitting, key=lambda other: (other.num_tokens, other.has_adapters, _rank(other), other.num_rows))

    def choose(
        self, num_tokens: int, num_rows: int, *, decode_only: bool, variant: Variant, has_adapters: bool = False
    ) -> Bucket:
        """The smallest bucket that holds the step. Raises ValueError if the step exceeds a limit.

        Args:
            has_adapters: whether one of the rows has an adapter.
        """
        return self._of(self._plain(num_tokens, num_rows, decode_only, variant), has_adapters)

    def _of(self, plain: Bucket, has_adapters: bool) -> Bucket:
        if has_adapters and not self.config.adapters:
            raise ValueError(f"no program has adapters: {self.config}")
        return _with_adapters(plain) if has_adapters else plain

    def _plain(self, num_tokens: int, num_rows: int, decode_only: bool, variant: Variant) -> Bucket:
        c = self.config
        if not (1 <= num_rows <= c.max_num_seqs and num_rows <= num_tokens <= c.max_num_batched_tokens):
            raise ValueError(f"no step has this shape: {num_tokens=} {num_rows=} with {c}")
        if variant is Variant.SCORE:
            return self._score
        if variant is Variant.EMBED:
            return next(b for b in self._embed if num_tokens <= b.num_tokens and num_rows <= b.num_rows)
        if decode_only:
            if num_tokens != num_rows:
                raise ValueError(f"decodes bring one token each: {num_tokens=} {num_rows=}")
            rows = self._decode[bisect_left(self._decode, num_rows)]
            return Bucket(rows, rows, variant)
        for tokens, row_rungs in self._mixed[bisect_left(self._tokens, num_tokens) :]:
            if num_rows <= row_rungs[-1]:
                return Bucket(tokens, row_rungs[bisect_left(row_rungs, num_rows)], Variant.SAMPLE)
        raise AssertionError("the largest bucket holds every legal step")

    def choose_drafts(self, num_rows: int, variant: Variant, *, has_adapters: bool = False) -> Bucket | None:
        """The smallest bucket with drafts that has at least this many rows; None if there is none."""
        rung = bisect_left(self._draft_rows, num_rows)
        if rung == len(self._draft_rows):
            return None
        return self._of(self._with_drafts(self._draft_rows[rung], variant), has_adapters)

    def _with_drafts(self, num_rows: int, variant: Variant) -> Bucket:
        return Bucket(num_rows * (1 + self.config.num_drafts), num_rows, variant, self.config.num_drafts)

    def better_left(self, num_tokens: int, *, next_decodes: int | None, step_cost_tokens: int) -> int:
        """The number of tokens that a mixed step leaves to the next one, instead of padding up to its rung; mostly 0.

        They are the tokens above the next lower rung. If the next step has prompt tokens anyway (`next_decodes` None),
        they cost their own number there. If it would only have had `next_decodes` decodes, they turn it into a mixed
        step. In both cases `step_cost_tokens` are added, for the delay and for the larger number of steps.
        """
        rung = bisect_left(self._tokens, num_tokens)
        if rung == 0:
            return 0
        above, below = self._tokens[rung], self._tokens[rung - 1]
        rest = num_tokens - below
        if next_decodes is None:
            later = rest
        else:
            mixed = bisect_left(self._tokens, min(rest + next_decodes, self._tokens[-1]))
            later = self._tokens[mixed] - next_decodes
        return rest if below + later + step_cost_tokens < above else 0


def _with_adapters(bucket: Bucket) -> Bucket:
    return replace(bucket, has_adapters=True)


def _rank(bucket: Bucket) -> int:
    """Each variant computes what those before it do, and more."""
    return list(Variant).index(bucket.variant)


def _holds(large: Bucket, small: Bucket) -> bool:
    """Whether a program computes every step of another one. A decode is also a step of a mixed program, and a step with
    prompt tokens is none of a program for decodes only. With adapters, a program also computes rows without them."""
    return (
        large.num_drafts == small.num_drafts
        and large.num_tokens >= small.num_tokens
        and large.num_rows >= small.num_rows
        and large.has_adapters >= small.has_adapters
        and _rank(large) >= _rank(small)
        and (small.decode_only or not large.decode_only)
    )


def _powers(smallest: int, largest: int, apart: int = 2) -> list[int]:
    """Numbers from `smallest` (rounded up to a power of two), each a fixed multiple of the one before, and
    `largest`."""
    rung = 1 << (smallest - 1).bit_length()
    out = []
    while rung < largest:
        out.append(rung)
        rung *= apart
    return [*out, largest]
