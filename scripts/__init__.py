"""Wires the packages together. Each module here is a command, `python -m scripts.NAME`, except `llm` and
`weight_sender`: import them.

`flags` reads the command line, `building` builds a running engine from settings, `offline` answers requests without
HTTP, and `lab` measures.
"""
