"""Where the rooms are wired together. Each module here is a command, `python -m scripts.NAME`, but `llm`: import it.

`wiring` turns settings into a running engine, `offline` answers without HTTP, `benchmarks` measures, and `demo` trains
the embedded checkpoint.
"""
