"""Runs a compiler for chips that are not here in a process of its own, and reads the JSON objects that it prints.

A process compiles for one target only: the first compilation for a GPU fixes the PTX version, and libtpu reads its
flags when it loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# So that several may run on one machine, and none asks for a metadata server or a chip.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class CompilerError(RuntimeError):
    """The process has failed. The message is the end of what it wrote to stderr."""


def printed_by(module: str, *arguments: str, stdin: bytes = b"", **environment: str) -> list[dict[str, Any]]:
    """What `python -m module` prints. Raises CompilerError if it fails."""
    return list(printing(module, *arguments, stdin=stdin, **environment))


def printing(module: str, *arguments: str, stdin: bytes = b"", **environment: str) -> Iterator[dict[str, Any]]:
    """As `printed_by`, each object when it is there."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | ENVIRONMENT | environment,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            except BaseException:
                process.kill()  # nobody waits for the rest
                raise
        if process.returncode:
            errors.seek(0)
            raise CompilerError(f"{' '.join([module, *arguments])}: {errors.read().decode()[-4000:]}")
