"""Runs a compiler for chips that are not here in a process of its own, and reads the JSON objects that it prints.

A process compiles for one target only: the first compilation for a GPU fixes the PTX version, and libtpu reads its
flags when it loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# So that several may run on one machine, and none asks for a metadata server or a chip.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class CompilerError(RuntimeError):
    """The process has failed. The message is the end of what it wrote to stderr."""


def printed_by(module: str, *arguments: str, stdin: bytes = b"", **environment: str) -> list[dict[str, Any]]:
    """What `python -m module` prints. Raises CompilerError if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | ENVIRONMENT | environment,
        input=stdin,
        capture_output=True,
        check=False,
    )
    if process.returncode:
        raise CompilerError(f"{' '.join([module, *arguments])}: {process.stderr.decode()[-4000:]}")
    return [json.loads(line) for line in process.stdout.decode().splitlines() if line.startswith("{")]
