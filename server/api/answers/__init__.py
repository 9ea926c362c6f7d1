"""From a generation to the response: one JSON object, or a stream of chunks, with log-probabilities and usage."""
