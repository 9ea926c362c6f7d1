"""The host-side continuous batcher: requests, pages, the scheduler and the engine loop. Imports no jax."""
