"""HTTP/1.1: connections and their limits, bodies, API keys, errors and server-sent events.

The package uses uvicorn, Starlette and the settings, but not the model, the tokenizer or the engine.
"""
