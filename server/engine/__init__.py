"""Runs the engine in a separate process: the messages, both ends, and the outputs of one request.

The package depends on ZeroMQ, `batcher`, `server.text` and `server.http.request_error`, not on routes and schemas.
"""
