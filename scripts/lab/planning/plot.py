"""Throughput against latency of the simulated settings, as a picture. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripts.lab.planning.sweep import Outcome


def check_installed() -> None:
    """Raises ValueError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib: .venv/bin/pip install 'matplotlib>=3.10' (the extra `plot`)"
        ) from error


def plot(outcomes: Sequence[Outcome], best: Outcome, path: Path, title: str) -> None:
    """Writes the picture: a point per simulated load, its settings as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        buckets = outcome.candidate.memory.buckets
        chips = f"{outcome.candidate.num_replicas} x {outcome.candidate.sizes.chips} chips"
        name = f"{chips}, {buckets.max_num_seqs} rows, {buckets.max_num_batched_tokens} tokens"
        lines.setdefault(name, []).append(_point(outcome))
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker="o", label=name)
    axes.plot(*_point(best), marker="*", markersize=18, color="black", linestyle="none", label="chosen")
    axes.set(xlabel="time per output token, p95, ms (estimated)", ylabel="output tokens/s (estimated)", title=title)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path)


def _point(outcome: Outcome) -> tuple[float, float]:
    return outcome.latencies["tpot_ms"]["p95"], outcome.output_tokens_per_s
