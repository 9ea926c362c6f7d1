"""Llama 3 in Flax NNX: configuration, forward pass, sharding, weights, and the runner that executes steps."""
