"""HTTP/1.1 on the wire: connections and their limits, bodies, keys, errors, server-sent events, long work in turns.

Knows uvicorn, Starlette and the settings. It knows nothing of models, text or the engine.
"""
