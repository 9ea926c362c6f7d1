"""Load on an OpenAI-compatible server: prompts, lengths, arrivals, a client, its metrics, and attacks. Needs no jax."""
