"""Keeps executables on disk between starts: a start that finds them neither traces nor compiles.

JAX serialises an executable as a pickle, and whoever writes the file decides what code the next start runs. So the
folder must belong to this user and be closed to the writing of others. An executable runs only on the machine and
under the versions that it was compiled for, which its fingerprint holds.
"""

from __future__ import annotations

import logging
import os
import stat
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

_PRIVATE = 0o700
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ExportedPrograms[K: Hashable]:
    """The executables of one fingerprint.

    Args:
        folder: for the executables of all fingerprints; made for this user alone if absent.
        fingerprint: of all that decides the executables besides names and arguments, see `executable_fingerprint`.
        programs: all that may be asked for.
        names: of the same programs.

    Raises:
        ValueError: another user could write to the folder.
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path, fingerprint: str, programs: Mapping[K, Program], names: Mapping[K, str]) -> None:
        self.found: set[K] = set()
        self._programs = programs
        self._names = names
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        check_private(folder)
        self._files = ProgramFiles(folder, fingerprint, kind="exported program", suffix=".exe", mode=_PRIVATE)
        check_private(folder / fingerprint)

    def load(self, key: K) -> jax.stages.Compiled | None:
        """The executable; None if it is not there or cannot be used."""
        path = self._path(key)
        if not path.exists():
            return None
        program = self._programs[key]
        try:
            check_private(path)
            serialized = self._files.read(path)
            if serialized is None:
                return None
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


def check_private(path: Path) -> None:
    """Raises ValueError if another user owns the file or folder, or could write to it."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"--export-cache: {path} belongs to another user, who could run code here through it: name a folder of "
            "your own"
        )
    if status.st_mode & _WRITTEN_BY_OTHERS:
        raise ValueError(
            f"--export-cache: other users may write to {path}, and could run code here through it: `chmod 700` it if "
            "you trust what it holds, or name another folder"
        )


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
