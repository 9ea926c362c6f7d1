"""Keeps executables on disk between starts: a start that finds them neither traces nor compiles.

JAX serialises an executable as a pickle, and whoever writes the file decides what code the next start runs. An
executable runs only on the machine and under the versions that it was compiled for, which its fingerprint holds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib import xla_client

from model.compiling.program_files import ProgramFiles
from model.compiling.traced_programs import Program, fingerprint

logger = logging.getLogger(__name__)


class ExportedPrograms[K: Hashable]:
    """The executables of one fingerprint.

    Args:
        folder: for the executables of all fingerprints, as for `ProgramFiles`; made for this user alone if absent.
        fingerprint: of all that decides the executables besides names and arguments, see `executable_fingerprint`.
        programs: all that may be asked for.
        names: of the same programs.

    Raises:
        ValueError: another user could write to the folder.
    """

    def __init__(self, folder: Path, fingerprint: str, programs: Mapping[K, Program], names: Mapping[K, str]) -> None:
        self.found: set[K] = set()
        self._programs = programs
        self._names = names
        self._lock = threading.Lock()
        self._files = ProgramFiles(
            folder, fingerprint, kind="exported program", suffix=".exe", private_to="--export-cache"
        )

    def load(self, key: K) -> jax.stages.Compiled | None:
        """The executable; None if it is not there or cannot be used."""
        path = self._path(key)
        program, serialized = self._programs[key], self._files.read(path)
        if serialized is None:
            return None
        try:
            executable = serialize_executable.deserialize_and_load(
                serialized,
                jax.tree.structure((program.arguments, {})),
                jax.tree.structure(program.out_shardings),
                execution_devices=program.devices(),
            )
        except Exception as error:  # of any type: JAX, XLA and pickle do not say which
            logger.warning("%s cannot be used, and is made again: %s: %s", path, type(error).__name__, error)
            return None
        with self._lock:
            self.found.add(key)
        return executable

    def store(self, key: K, executable: jax.stages.Compiled) -> None:
        """Keeps an executable. It must have been compiled by this process: XLA's code for CPUs is not complete any
        more in an executable that came from JAX's cache."""
        serialized, _, _ = serialize_executable.serialize(executable)
        self._files.write(self._path(key), serialized)

    def discard(self, keys: Iterable[K]) -> None:
        """Deletes executables, which are not found any more."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)
            self.found.discard(key)

    def _path(self, key: K) -> Path:
        path = self._files.path(self._names[key], *self._programs[key].shapes)
        assert isinstance(path, Path)
        return path


def executable_fingerprint(
    packages: Iterable[Path], facts: Iterable[object], device: jax.Device, options: Mapping[str, Any]
) -> str:
    """A digest of all that decides an executable: all that decides its trace (see `fingerprint`), the compiler's
    options, the devices of this process and, on a CPU, its instructions.

    Args:
        options: of the compiler.
    """
    from_environment = xla_client.CompileOptions().SerializeAsString()  # XLA_FLAGS, as XLA has read them
    topology = [(other.id, other.device_kind, getattr(other, "coords", None)) for other in jax.devices()]
    machine = _cpu_features() if device.platform == "cpu" else ""
    return fingerprint(packages, (*facts, sorted(options.items()), from_environment, topology, machine), device)


def _cpu_features() -> str:
    """The lines about the first core's model and instructions: XLA compiles for these."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(kept))
