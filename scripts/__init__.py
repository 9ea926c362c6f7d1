"""Wires the packages together. Each module here is a command, `python -m scripts.NAME`, except `llm`: import it.

`wiring` turns settings into a running engine, `offline` answers without HTTP, `benchmarks` measures, and `demo` trains
the embedded checkpoint.
"""
