"""The host-side continuous batcher: requests, pages, the scheduler and the engine loop. No jax in this room."""
