"""The laboratory: benchmarks, accounts of compiled programs, checks of a chip, plans, and the demo's training.

Nothing that serves imports it. `python -m scripts.lab` lists its instruments, `scripts/lab/README.md` says how to use
them.
"""
