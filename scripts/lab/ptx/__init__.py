"""Executes the GPU kernels' PTX on the CPU, instruction by instruction, and names hazards."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    from scripts.lab.ptx import command

    return command.main(argv)
