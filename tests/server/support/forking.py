"""Forks servers for the tests: `python -m tests.server.support.forking SOCKET`, where SOCKET is a descriptor.

A server imports for a second. This process has imported it all, and each server is a fork of it. For each it gets four
descriptors: one to read the server's environment and its message for `launch.serve` from, the server's stdout and its
stderr, and one on which it says the server's process id and, when the server has ended, its exit code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys

from tests.server.support.launch import serve

NUM_DESCRIPTORS = 4


def next_server(control: socket.socket) -> bytes | None:
    """The message of a server, in its new process; None, in this process, when no more servers are wanted."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, NUM_DESCRIPTORS)
        if not data:
            return None
        if os.fork() == 0:
            control.close()
            return watched(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def watched(message: int, stdout: int, stderr: int, status: int) -> bytes:
    """Forks the server, and returns its message there. This process waits for it, says how it ended, and ends."""
    if pid := os.fork():
        for descriptor in (message, stdout, stderr):
            os.close(descriptor)
        os.write(status, b"%d\n" % pid)
        _, ended = os.waitpid(pid, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
        os._exit(0)
    os.close(status)
    for descriptor, own in ((stdout, sys.stdout), (stderr, sys.stderr)):
        os.dup2(descriptor, own.fileno())
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(message, "rb") as file:
        environment, asked = pickle.load(file)
    os.environ.clear()
    os.environ.update(environment)
    return asked


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process decides when this one ends
    # What a server imports, at once or once the engine's process has been started.
    import server.app
    import server.main
    import server.serve_until_end
    import server.text.transformers_parts  # noqa: F401

    with socket.socket(fileno=int(sys.argv[1])) as control:
        asked = next_server(control)
    if asked is not None:
        return serve(asked)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 0


if __name__ == "__main__":
    sys.exit(main())
