"""Batch files: their lines, the journal of a run, the folder that keeps files and batches, and one batch's work.

It knows no engine and no routes. `scripts.offline` uses the lines and the journal, too.
"""
