"""The scheduler on traces in simulated time, under the product's admission policy and others. Needs no jax."""
