"""Wires the packages together. Each module here is a command, `python -m scripts.NAME`, except `llm` and
`weight_sender`: import them.

`flags` reads the command line, `building` makes a running engine of its settings, `offline` answers without HTTP, and
`lab` measures.
"""
