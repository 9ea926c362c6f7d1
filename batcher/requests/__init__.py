"""A request on its way into the engine and out of it: checks, masks under a grammar, deadlines, last outputs."""
