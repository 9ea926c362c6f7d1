"""A store of programs in one folder. Each start loads the programs that earlier starts have stored.

A program may be stored at each of these stages:

- the trace, as StableHLO of `jax.export`, in `traced/`. A start that finds it does not run the model's Python code. It
  is data: reading it runs no code.
- the compiled program, in `xla/`, where JAX's own cache finds it by the lowered program (`compile_cache`). If the code
  has changed but the lowered program is the same, the program is traced but not compiled.
- the executable, in `executables/`: JAX's pickle of it, with the key of the compiled program in place of XLA's bytes. A
  start that finds it neither traces nor lowers the program.

The pickle and XLA's bytes run as code, so the folder is private (`kept_files`). An executable runs only on the machine
and with the versions for which it was compiled; its key includes both.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Mapping
from typing import Any, override

import jax
from jax import export
from jax.experimental import serialize_executable
from jaxlib import _jax, xla_client

from model.compiling.compile_cache import Made, executable_in, file_of
from model.compiling.kept_files import KeptFiles
from model.compiling.program import Program
from model.inputs.paths import Place

logger = logging.getLogger(__name__)


class ProgramStore:
    """The programs of one runner. A program is identified by its name and its shapes.

    Args:
        folder: the folder of the programs of all starts (`KeptFiles`).
        traced_from: the digest of all that decides the traces, other than names and shapes (`program.fingerprint`).
        compiled_from: the same for executables (`executable_fingerprint`); None: no executables are kept or loaded.
    """

    def __init__(self, folder: Place, traced_from: str, compiled_from: str | None) -> None:
        self.num_traces_found = 0
        self._files = KeptFiles(folder)
        self._traced_from = traced_from
        self._compiled_from = compiled_from

    def has(self, name: str, program: Program) -> bool:
        """Whether the program need not be traced."""
        return any(map(self._files.has, filter(None, (self._executable(name, program), self._trace(name, program)))))

    def lower(self, name: str, program: Program) -> jax.stages.Lowered:
        """The lowered program. If its trace is not in the folder, the program is traced and the trace is stored."""
        file = self._trace(name, program)
        serialized = self._files.read(file)
        if serialized is None:
            exported = program.traced()
            self._files.write(file, exported.serialize())
        else:
            exported = export.deserialize(bytearray(serialized))
            self.num_traces_found += 1
        return program.calling(exported).lower()

    def load(self, name: str, program: Program) -> jax.stages.Compiled | None:
        """Loads the executable of a program; None if there is none, or if it cannot be used, which is a warning."""
        file = self._executable(name, program)
        if file is None or (kept := self._files.read(file)) is None:
            return None
        key, _, pickled = kept.partition(b"\n")
        if (entry := self._files.read(file_of(key.decode()))) is None:
            return None
        try:
            loaded, arguments, no_kwargs = _Unpickler(pickled, program.devices(), executable_in(entry)).load()
            arguments = jax.tree.unflatten(jax.tree.structure((program.arguments, {})), arguments)
            results = jax.tree.structure(program.out_shardings)
            return jax.stages.Compiled(loaded.load(), [], arguments, results, no_kwargs=no_kwargs)
        except Exception as error:  # of any type: JAX, XLA and pickle do not say which
            message = "%s cannot be used, and is made again: %s: %s"
            logger.warning(message, self._files.folder / file, type(error).__name__, error)
            return None

    def keep(self, name: str, program: Program, made: Made) -> bool:
        """Stores an executable. Returns False if it cannot be loaded later: JAX's cache has to have the compiled
        program in the same folder."""
        file = self._executable(name, program)
        if file is None or made.folder != self._files.folder:
            return False
        pickled: Any = made.executable
        arguments = jax.tree.leaves(pickled.args_info)
        stream = io.BytesIO()
        _Pickler(stream).dump((pickled._executable._unloaded_executable, arguments, pickled._no_kwargs))
        self._files.write(file, made.key.encode() + b"\n" + stream.getvalue())
        return True

    def discard(self, name: str, program: Program) -> None:
        """Deletes an executable and its compiled program, which are then not found by any start."""
        file = self._executable(name, program)
        if file is not None and (kept := self._files.read(file)) is not None:
            self._files.delete(file_of(kept.partition(b"\n")[0].decode()))
            self._files.delete(file)

    def _trace(self, name: str, program: Program) -> str:
        return f"traced/{self._traced_from}/{_digest(name, *program.traced_shapes)}.stablehlo"

    def _executable(self, name: str, program: Program) -> str | None:
        if self._compiled_from is None:
            return None
        return f"executables/{self._compiled_from}/{_digest(name, *program.shapes)}.exe"


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Pickles an executable without XLA's bytes. On a CPU, an executable that came from JAX's cache could not be
    serialised again: it no longer has all of its code."""

    @override
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, (xla_client.LoadedExecutable, _jax.Executable)):
            return ("exec", b"")
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Unpickles an executable of `_Pickler` with XLA's bytes."""

    def __init__(self, pickled: bytes, devices: tuple[jax.Device, ...], executable: bytes) -> None:
        super().__init__(io.BytesIO(pickled), devices[0].client, devices)
        self._executable = executable

    @override
    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        return super().persistent_load(("exec", self._executable) if pid[0] == "exec" else pid)


def executable_fingerprint(traced_from: str, options: Mapping[str, Any]) -> str:
    """A digest of all that decides an executable: all that decides its trace (`program.fingerprint`), the compiler's
    options, the devices of this process and, on a CPU, its instructions."""
    from_environment = (xla_client.CompileOptions().SerializeAsString(), os.environ.get("LIBTPU_INIT_ARGS"))
    return _digest(traced_from, sorted(options.items()), from_environment, topology(), len(jax.devices()))


def topology() -> str:
    """Identifies the kind and the links of the devices of this process and, on a CPU, its instructions."""
    try:
        return str(xla_client.get_topology_for_devices(jax.devices()).fingerprint())
    except jax.errors.JaxRuntimeError:  # a platform whose devices have none
        return str(len(jax.devices()))


def _digest(*facts: object) -> str:
    """A digest of facts. The `repr` of each must show all its values."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
