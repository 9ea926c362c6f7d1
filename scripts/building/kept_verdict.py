"""Self-tests that kernels have passed: later starts need not run them again.

A verdict is a file in the folder of compiled programs, under the rule of that folder (`kept_files`). Its name is a
digest of all that decides whether the kernels pass. Only success is kept: a failure may come from other users of the
device, so the next start tests again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax

import pallas_kernels
from model.compiling.compiler_options import compiler_options
from model.compiling.kept_files import KeptFiles
from model.compiling.program import fingerprint
from model.compiling.program_store import executable_fingerprint
from model.inputs.paths import Place
from pallas_kernels.cpu import library

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class KeptVerdict:
    """The verdict of one self-test on the devices of this process.

    Args:
        facts: the kernels' shapes and the test's programs. The `repr` of each must show all its values.
        folder: the folder of compiled programs; None: nothing is kept.
    """

    def __init__(self, facts: Iterable[object], platform: str, folder: Place | None) -> None:
        self._files = None
        if folder is None or (platform == "gpu" and not NVIDIA_DRIVER.exists()):
            return
        driver = NVIDIA_DRIVER.read_text() if platform == "gpu" else ""
        parts = (*facts, driver, library.content_digest())
        code = Path(pallas_kernels.__file__).parent
        made_from = fingerprint([code], parts, jax.local_devices()[0])
        self._name = f"self_tests/{executable_fingerprint(made_from, compiler_options(platform))}.passed"
        self._files = KeptFiles(folder)

    def read(self) -> str | None:
        """The remark of the test that has passed; None: there is none."""
        passed = None if self._files is None else self._files.read(self._name)
        return None if passed is None else passed.decode()

    def write(self, remark: str) -> None:
        if self._files is not None:
            self._files.write(self._name, remark.encode())

    def delete(self) -> None:
        if self._files is not None:
            self._files.delete(self._name)
