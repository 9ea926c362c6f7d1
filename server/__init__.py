"""The OpenAI-compatible endpoint. This package does not import jax: the engine runs in its own process.

`main` starts both processes. `app` combines the routes. The subpackages are `api`, `engine`, `grammar`, `http`, `text`,
and `api_processes` for several HTTP processes.
"""
