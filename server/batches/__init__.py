"""Batch files: their lines, the journal of a run, and the folder that keeps files and batches.

The package does not depend on the engine or the routes. `scripts.offline` also uses the lines and the journal.
"""
