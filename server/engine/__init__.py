"""The engine in a process of its own: its messages, the process, the client that speaks with it, one request's outputs.

Knows ZeroMQ, `batcher` and the rooms `text` and `http.errors`. It knows nothing of routes and schemas.
"""
