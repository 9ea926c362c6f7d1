"""The OpenAI-compatible endpoint: HTTP, text and streams; the engine has a process of its own. No jax in this room."""
