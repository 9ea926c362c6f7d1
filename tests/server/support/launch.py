"""Runs a server in a process of its own, as the tests do: `python -m tests.server.support.launch PICKLE`, hex-encoded.

The pickle holds (settings, engine target, engine arguments, those of further engines). The server's address goes to
stdout, and before it the number of the objects that the garbage collector need not read.
"""

from __future__ import annotations

import gc
import pickle
import sys


def serve(message: bytes) -> int:
    """Serves what `message`, the pickle, asks for. Returns the process's exit code."""
    # Here, for the engine's process imports this module, too, and needs none of it.
    from server.engine.protocol import EngineFailedError
    from server.logs import JSON, configure_log
    from server.main import run

    settings, target, engine_args, more_engines = pickle.loads(message)
    if settings.log_format == JSON:
        configure_log("INFO", JSON)
    try:
        return run(
            settings,
            target,
            engine_args,
            more_engines=more_engines,
            report=lambda line: print(f"report: {line}", flush=True),
            on_ready=lambda url: print(f"frozen: {gc.get_freeze_count()}\nready: {url}", flush=True),
        )
    except EngineFailedError as error:
        print(f"failed: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(serve(bytes.fromhex(sys.argv[1])))
