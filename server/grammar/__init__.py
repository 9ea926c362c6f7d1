"""Structured output: makes grammars of clients' requests, and computes which tokens a grammar allows next.

Depends on llguidance, `batcher` and the rooms `text` and `http.request_error`, not on routes and schemas of requests.
"""
