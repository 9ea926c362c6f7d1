"""The OpenAI-compatible endpoint. No jax in this room: the engine has a process of its own.

`main` starts both processes, `app` puts the routes together. Below it lie four rooms: `api`, `engine`, `text`, `http`.
"""
