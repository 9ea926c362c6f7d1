"""Reports the failure of a command: one line on stderr and an exit code. --debug prints the traceback first."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from batcher.errors import EngineDeadError
from model.inputs.words import described, is_worded, one_line
from server.engine.protocol import EngineFailedError

EXIT_FAILED = 1
EXIT_REFUSED = 2  # as argparse: a flag, a path or a checkpoint that cannot be used
EXIT_INTERRUPTED = 130  # as shells for SIGINT


class FailedError(RuntimeError):
    """The work of a command has failed; the message is for the user."""


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--debug`, which every command has."""
    parser.add_argument("--debug", action="store_true", help="The traceback of a failure is printed, too.")


def run_command(command: str, body: Callable[[], int], *, debug: bool) -> int:
    """Runs `body` and returns its exit code. An exception is reported on stderr; its type determines the exit code."""
    try:
        return body()
    except (Exception, KeyboardInterrupt) as error:
        return failed(command, error, debug=debug)


def failed(command: str, error: BaseException, *, debug: bool) -> int:
    """Reports the error, and returns the exit code of `command`."""
    if debug:
        traceback.print_exception(error)
    match error:
        case KeyboardInterrupt():
            code, line = EXIT_INTERRUPTED, "interrupted"
        case EngineFailedError(is_refusal=True):
            code, line = EXIT_REFUSED, one_line(str(error))
        case FailedError() | EngineFailedError() | EngineDeadError():
            code, line = EXIT_FAILED, one_line(str(error))
        case _:
            code, line = EXIT_REFUSED if is_worded(error) else EXIT_FAILED, described(error)
    print(f"{command}: {line}", file=sys.stderr)
    return code
