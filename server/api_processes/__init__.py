"""Several HTTP processes in front of the engines (`--api-server-count`).

The parent binds the address, starts the engines and the HTTP processes, and serves no requests itself. Each HTTP
process accepts connections at the parent's address, sends commands to the engines directly, and receives the outputs of
its own requests as an API server of each engine (`server/engine/outbox.py`). The parent and the HTTP processes ask
each other over a bus (`server/bus.py`), and share a few counts in memory (`server/shared_counts.py`).
"""
