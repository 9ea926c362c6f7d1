"""Several HTTP processes in front of the engines (`--api-server-count`).

The parent binds the address, starts the engines and the HTTP processes, and serves no requests itself. Each HTTP
process accepts connections from the inherited socket, sends commands to the engines directly, and gets the outputs of
its own requests through doors of its own (`server/engine/doors.py`). The parent and the HTTP processes call each other
by private HTTP (`server/http/private.py`), and share a few counts in memory (`server/board.py`).
"""
