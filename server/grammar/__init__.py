"""Structured output: what a client asks for becomes a grammar, and a grammar says which tokens may come next.

Knows llguidance, `batcher` and the rooms `text` and `http.errors`. It knows nothing of routes and schemas of requests.
"""
