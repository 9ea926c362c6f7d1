"""Structured output: makes grammars from clients' requests, and computes which tokens a grammar allows next.

The package depends on llguidance, `batcher`, `server.text` and `server.http.request_error`, not on routes and the
schemas of requests.
"""
