"""What benches print: tables that stay Markdown, and a head that a result can be kept with."""

from __future__ import annotations

import sys

from scripts.lab.tables import Table, command, ratio


def test_columns_have_their_formats_and_widths():
    told: list[str] = []
    table = Table({"": "<8", "step ms": "9.2f", "by": "", "share": ".0%", "p50/p99": ">"}, told.append)
    table.row("decode 1", 1.234, "XLA", 0.5, "7/9")
    table.row("x", None, "C", 1, None)
    assert told == table.lines == [
        "|          |   step ms | by | share | p50/p99 |",
        "| -------- | --------: | --- | --: | --: |",
        "| decode 1 |      1.23 | XLA | 50% | 7/9 |",
        "| x        |         - | C | 100% | - |",
    ]  # fmt: skip


def test_a_missing_figure_has_no_ratio():
    assert ratio("ours / theirs", 3.0, 2.0) == "ours / theirs: 1.500"
    assert ratio("ours / theirs", 3.0, 0.0) == ratio("ours / theirs", None, 2.0) == "ours / theirs: -"


def test_the_command_is_told_without_keys(monkeypatch):
    typed = ["serving", "--api-key", "sk-1", "--admin-api-key=sk-2", "--model", "a model"]
    monkeypatch.setattr(sys, "argv", ["-", *typed])
    assert command() == ("python -m scripts.lab serving --api-key ... --admin-api-key=... --model 'a model'")
