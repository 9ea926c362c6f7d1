"""Runs one engine over several hosts. The leader schedules, and the followers replay its steps on their own devices.

The package depends on ZeroMQ and `batcher.step`. The batcher and the model do not know that there are several hosts.
"""
