"""The figures of a serving bench: TTFT, TPOT, ITL, end-to-end latency, throughput and goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.lab.load.client import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (first left out)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def request_metrics(outcome: Outcome) -> dict[str, float | None]:
    """Milliseconds of one finished request; None for a missing time, such as the TPOT of a single token.

    ITL is per pair of chunks, so it is not here: see `inter_token_latencies`.
    """
    if not outcome.chunk_times:
        return {"ttft": None, "tpot": None, "e2el": (outcome.end - outcome.start) * 1e3}
    first, last, tokens = outcome.chunk_times[0], outcome.chunk_times[-1], outcome.output_tokens
    return {
        "ttft": (first - outcome.start) * 1e3,
        "tpot": (last - first) / (tokens - 1) * 1e3 if tokens > 1 else None,
        "e2el": (outcome.end - outcome.start) * 1e3,
    }


def inter_token_latencies(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Milliseconds between the chunks of each stream, all streams together."""
    gaps = [np.diff(outcome.chunk_times) for outcome in outcomes if len(outcome.chunk_times) > 1]
    return np.concatenate(gaps) * 1e3 if gaps else np.empty(0)


def summary(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 90, 99),
    slos_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of the report, as plain JSON values. Failed requests count only in `failed`."""
    finished = [outcome for outcome in outcomes if outcome.error is None]
    per_request = [request_metrics(outcome) for outcome in finished]
    values = {
        name: np.array([row[name] for row in per_request if row[name] is not None]) for name in ("ttft", "tpot", "e2el")
    }
    values["itl"] = inter_token_latencies(finished)
    output_tokens = sum(outcome.output_tokens for outcome in finished)
    input_tokens = sum(outcome.prompt_tokens or 0 for outcome in finished)
    result: dict[str, Any] = {
        "completed": len(finished),
        "failed": len(outcomes) - len(finished),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error is not None})[:10],
        "duration_s": duration_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        # Chunks are counted only if a server reports no usage; a chunk may have several tokens.
        "tokens_counted_by": sorted({"chunks" if o.completion_tokens is None else "usage" for o in finished}),
        "requests_per_s": len(finished) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (input_tokens + output_tokens) / duration_s,
        "max_client_lag_ms": max((outcome.lag for outcome in outcomes), default=0.0) * 1e3,
    }
    for name in metrics:
        result[f"{name}_ms"] = _distribution(values[name], percentiles)
    if slos_ms:
        good = sum(_meets(row, outcome, slos_ms) for row, outcome in zip(per_request, finished, strict=True))
        result["goodput"] = {"slos_ms": dict(slos_ms), "requests": good, "requests_per_s": good / duration_s}
    return result


def both_of(result: Mapping[str, Any], metric: str, digits: int = 0) -> str | None:
    """The median and the 99th percentile of a metric of a summary; None if it has none."""
    figures = result.get(f"{metric}_ms")
    return f"{figures['p50']:.{digits}f}/{figures['p99']:.{digits}f}" if figures else None


def failures_of(result: Mapping[str, Any]) -> str:
    """How many requests of a summary have failed, and why one has; empty if none has."""
    return f"{result['failed']} FAILED: {result['errors'][0]}" if result["failed"] else ""


def _meets(row: Mapping[str, float | None], outcome: Outcome, slos_ms: Mapping[str, float]) -> bool:
    """A request of one token has no TPOT and no ITL, so it meets both. The ITL objective limits the longest gap."""
    for name, limit in slos_ms.items():
        if name == "itl":
            gaps = inter_token_latencies([outcome])
            value = float(gaps.max()) if gaps.size else None
        else:
            value = row[name]
        if value is not None and value > limit:
            return False
    return True


def _distribution(values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float] | None:
    if not values.size:
        return None
    points = np.percentile(values, percentiles)
    return {"mean": float(values.mean())} | {f"p{p:g}": float(x) for p, x in zip(percentiles, points, strict=True)}


def table(result: Mapping[str, Any], title: str) -> str:
    """The summary as a text table."""
    lines = [title, "-" * len(title)]
    lines.append(f"requests          {result['completed']} completed, {result['failed']} failed")
    lines.append(f"duration          {result['duration_s']:.2f} s")
    lines.append(
        f"tokens            {result['input_tokens']} in, {result['output_tokens']} out "
        f"(counted by {' and '.join(result['tokens_counted_by']) or 'nothing'})"
    )
    lines.append(
        f"throughput        {result['output_tokens_per_s']:.1f} output tokens/s, "
        f"{result['total_tokens_per_s']:.1f} tokens/s, {result['requests_per_s']:.2f} requests/s"
    )
    for name in METRICS:
        figures = result.get(f"{name}_ms")
        if figures:
            shown = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
            lines.append(f"{name.upper():<17} {shown}  ms  ({NAMES[name]})")
    if "goodput" in result:
        goodput = result["goodput"]
        slos = ", ".join(f"{name} <= {limit:g} ms" for name, limit in goodput["slos_ms"].items())
        lines.append(f"goodput           {goodput['requests_per_s']:.2f} requests/s meet {slos}")
    if result["max_client_lag_ms"] > 50:
        lines.append(f"NOTE: the client sent up to {result['max_client_lag_ms']:.0f} ms late: it was itself overloaded")
    lines += [f"error: {error}" for error in result["errors"]]
    return "\n".join(lines)
