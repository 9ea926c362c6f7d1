"""The engine in a separate process: the messages, the process, its client, and the outputs of one request.

Depends on ZeroMQ, `batcher` and the rooms `text` and `http.request_error`, not on routes and schemas.
"""
