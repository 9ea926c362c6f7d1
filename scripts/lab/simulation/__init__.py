"""The scheduler on traces in simulated time, with the product's admission policy and with others. Needs no jax."""
