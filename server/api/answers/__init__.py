"""Writes the response of a generation: one JSON object or a stream of chunks, with log-probabilities and usage."""
