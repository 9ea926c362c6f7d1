"""One engine over several hosts: the leader schedules, and the followers replay its steps on their own devices.

Depends on ZeroMQ and `batcher.step`. The batcher and the model do not know that there are several hosts.
"""
