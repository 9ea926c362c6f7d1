"""Keeps executables on disk between starts: a start that finds them neither traces nor compiles.

They are found by all that decides their trace, and also by the lowered program. If the code has changed but the lowered
program is the same, the program is traced but not compiled.

JAX serialises an executable as a pickle, so the writer of the file decides what code the next start runs. An executable
runs only on the machine and with the versions for which it was compiled; its fingerprint includes both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
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
        folder: the folder for the executables of all fingerprints (`ProgramFiles`). If absent, it is made for this user
            alone.
        fingerprint: the digest of all that decides the executables, other than names and arguments
            (`executable_fingerprint`).
        of_machine: the same digest without what decides the trace. It is used to find lowered programs.
        programs: all programs that may be asked for.
        names: the names of these programs.

    Raises:
        ValueError: another user could write to the folder.
    """

    def __init__(
        self, folder: Path, fingerprint: str, programs: Mapping[K, Program], names: Mapping[K, str], *, of_machine: str
    ) -> None:
        self.found: set[K] = set()
        self._programs = programs
        self._names = names
        self._lock = threading.Lock()
        make = partial(ProgramFiles, kind="exported program", suffix=".exe", private_to="--export-cache")
        self._files, self._by_lowered = make(folder, fingerprint), make(folder, of_machine)
        self._by_lowered.delete_unlinked()

    def load(self, key: K) -> jax.stages.Compiled | None:
        """Loads the executable of a program; None if there is none, or if it cannot be used."""
        return self._loaded(key, self._files, self._path(key))

    def load_lowered(self, key: K, lowered: jax.stages.Lowered) -> jax.stages.Compiled | None:
        """Loads the executable of an equal lowered program, which other code may have stored; None if there is none. A
        later `load` of `key` finds it, too."""
        path = self._path_of_lowered(key, lowered)
        executable = self._loaded(key, self._by_lowered, path)
        if executable is not None:
            self._files.link(self._path(key), path)
        return executable

    def _loaded(self, key: K, files: ProgramFiles, path: Path) -> jax.stages.Compiled | None:
        program, serialized = self._programs[key], files.read(path)
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

    def store(self, key: K, executable: jax.stages.Compiled, lowered: jax.stages.Lowered) -> None:
        """Stores an executable. This process must have compiled it: an executable from JAX's cache no longer has all of
        XLA's code for CPUs."""
        serialized, _, _ = serialize_executable.serialize(executable)
        path = self._path_of_lowered(key, lowered)
        self._by_lowered.write(path, serialized)
        if self._by_lowered.keeps:
            self._files.link(self._path(key), path)

    def discard(self, keys: Iterable[K]) -> None:
        """Deletes executables. They are not found later."""
        for key in keys:
            self._by_lowered.delete_links(self._path(key))
            self._path(key).unlink(missing_ok=True)
            self.found.discard(key)

    def _path(self, key: K) -> Path:
        path = self._files.path(self._names[key], *self._programs[key].shapes)
        assert isinstance(path, Path)
        return path

    def _path_of_lowered(self, key: K, lowered: jax.stages.Lowered) -> Path:
        path = self._by_lowered.path(lowered.as_text(), *self._programs[key].shapes)
        assert isinstance(path, Path)
        return path


def executable_fingerprint(
    packages: Iterable[Path], facts: Iterable[object], device: jax.Device, options: Mapping[str, Any]
) -> str:
    """A digest of all that decides an executable: all that decides its trace (`fingerprint`), the compiler's options,
    the devices of this process and, on a CPU, its instructions.

    Args:
        options: the compiler's options.
    """
    from_environment = xla_client.CompileOptions().SerializeAsString()  # XLA_FLAGS, as XLA has read them
    topology = [(other.id, other.device_kind, getattr(other, "coords", None)) for other in jax.devices()]
    machine = _cpu_features() if device.platform == "cpu" else ""
    return fingerprint(packages, (*facts, sorted(options.items()), from_environment, topology, machine), device)


def _cpu_features() -> str:
    """The lines of /proc/cpuinfo about the first core's model and instructions, for which XLA compiles."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(kept))
