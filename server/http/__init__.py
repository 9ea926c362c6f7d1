"""HTTP/1.1 on the wire: connections and their limits, bodies, keys, errors, server-sent events, long work in turns.

The package uses uvicorn, Starlette and the settings, but no model, no text and no engine.
"""
