"""Compiles the C sources for this machine's CPU, and registers their functions with XLA.

A library is compiled on the machine on which it runs, for the instructions of its CPU. This takes a few seconds once;
later starts find the library in its folder. Its name begins with a digest of all that decides its content, so a folder
that moves to another CPU gets another library. Its name ends with a digest of its content, so a damaged file is never
loaded. The products in 4 and 6 bits, which take half of the compiler's time, are a library of their own.

The compiler may run while jax is imported: this module imports jax when it loads a library.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pallas_kernels.errors import UnavailableError

logger = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-Wall", "-Wextra")
# Names of functions in the sources, and of custom calls in programs.
ATTEND, MULTIPLY = "pallas_serve_attend", "pallas_serve_multiply"
MULTIPLY_ROUNDED, MULTIPLY_FOUR_BIT = "pallas_serve_multiply_rounded", "pallas_serve_multiply_four_bit"
NORM, GATE, ROTATE = "pallas_serve_norm", "pallas_serve_gate", "pallas_serve_rotate"
ADD_ADAPTERS = "pallas_serve_add_adapters"
LOG_SUM_EXP, TEMPER = "pallas_serve_log_sum_exp", "pallas_serve_temper"
ZEROS = "pallas_serve_zeros"
NAMES = (
    ATTEND, MULTIPLY, MULTIPLY_ROUNDED, MULTIPLY_FOUR_BIT, NORM, GATE, ROTATE, ADD_ADAPTERS, LOG_SUM_EXP, TEMPER, ZEROS,
)  # fmt: skip
COMPILE_TIMEOUT_S = 300  # for one file
SOURCES = Path(__file__).parent
FILES = sorted(SOURCES.glob("*.c"))

_lock = threading.Lock()
_loaded: dict[bool, ctypes.CDLL] = {}  # by whether it is the library of the products in 4 and 6 bits
_compiling: dict[Path, Future[Path]] = {}  # by the folder; without the products in 4 and 6 bits


def start_compiling(folder: Path) -> None:
    """Starts to compile what `folder` does not have, except the products in 4 and 6 bits. `load` waits for it, and
    raises its errors."""
    future = _compiling[folder] = Future[Path]()

    def run() -> None:
        try:
            future.set_result(_built(find_compiler(), folder, folder, four_bit=False))
        except BaseException as error:
            future.set_exception(error)

    # An interpreter that ends does not wait for it.
    threading.Thread(target=run, name="c-compiler", daemon=True).start()


def load(folder: Path | None, *, four_bit: bool = False) -> None:
    """Registers the functions with XLA, once per process. Compiles what `folder` does not have, in parallel.

    Args:
        folder: the folder that keeps libraries. Only its owner may write to it, because a library is code. If it is
            None or cannot be written to, libraries are compiled for this process only.
        four_bit: also loads the products in 4 and 6 bits.

    Raises:
        UnavailableError: there is no compiler, or it fails.
        ValueError: the compiler takes too long.
    """
    with _lock:
        missing = [part for part in (False, True)[: 1 + four_bit] if part not in _loaded]
        if not missing:
            return
        import jax

        started = None if folder is None else _compiling.pop(folder, None)
        compiler = find_compiler()
        with tempfile.TemporaryDirectory(prefix="pallas-serve-") as temporary, ThreadPoolExecutor() as pool:

            def build(part: bool) -> Path:
                if started is not None and not part:
                    return started.result()
                return _built(compiler, folder, Path(temporary), four_bit=part)

            built = list(pool.map(build, missing))
            for part, path in zip(missing, built, strict=True):
                library = _open(path)
                for name in NAMES:
                    if (name == MULTIPLY_FOUR_BIT) == part:
                        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="cpu")
                _loaded[part] = library


def function(name: str, results: Any, **options: Any) -> Callable[..., Any]:
    """The function of this name, with results like these. The options are those of `jax.ffi.ffi_call`."""
    import jax

    load(None, four_bit=name == MULTIPLY_FOUR_BIT)  # an engine has loaded it already, from its folder
    return jax.ffi.ffi_call(name, results, **options)


def has_four_bit() -> bool:
    """Whether the products in 4 and 6 bits are loaded."""
    return True in _loaded


def content_digest() -> str:
    """A digest of the code of the loaded libraries; "" if none is loaded."""
    return " ".join(sorted(Path(library._name).stem for library in _loaded.values()))


def find_compiler() -> str:
    """The path of the compiler: that of the environment variable CC, or the first of COMPILERS that is installed.
    Raises UnavailableError if there is none."""
    asked = os.environ.get("CC")
    for name in (asked,) if asked else COMPILERS:
        if path := shutil.which(name):
            return path
    where = f"CC={asked} is not a program" if asked else f"there is no C compiler ({', '.join(COMPILERS)}) on the PATH"
    raise UnavailableError(f"{where}: install one, such as gcc")


def compile_library(compiler: str, path: Path, *options: str, sources: Iterable[Path] = FILES) -> None:
    """Compiles the library, all files at once, and renames it to `path` when it is complete.

    Args:
        options: options of the compiler, such as the one for the CPU.
        sources: the C files.

    Raises:
        UnavailableError: it cannot be compiled.
        ValueError: the compiler takes too long.
    """
    part = path.with_suffix(f".{os.getpid()}")  # several servers may start at once

    def run(*arguments: str) -> None:
        command = [compiler, *FLAGS, *options, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise UnavailableError(f"{compiler} could not compile the C code: {said[:300]}")

    try:
        with tempfile.TemporaryDirectory(prefix="pallas-serve-") as temporary, ThreadPoolExecutor() as pool:
            objects = {str(source): f"{temporary}/{source.stem}.o" for source in sources}
            include = f"-I{_include_folder()}"
            list(pool.map(lambda source: run(include, "-c", source, "-o", objects[source]), objects))
            run(*objects.values(), "-lm", "-o", str(part))
        part.chmod(0o700)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{compiler} has not compiled the C code in {COMPILE_TIMEOUT_S} s: name another compiler by the variable "
            "CC, or choose --attention-backend reference, which needs none and is several times slower"
        ) from error
    except OSError as error:
        raise UnavailableError(f"{compiler} could not compile the C code into {path.parent}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _built(compiler: str, folder: Path | None, temporary: Path, *, four_bit: bool) -> Path:
    """The path of a library. It is compiled if `folder` does not have it or has a damaged file."""
    sources = [file for file in FILES if (file.stem == "four_bit") == four_bit]
    made_from = _digest(compiler, sources)
    for path in () if folder is None else folder.glob(f"{made_from}-*.so"):
        with suppress(OSError):
            if path == _named(path, made_from):
                return path
            logger.warning("%s is damaged: the C code is compiled again", path)
            path.unlink()
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            logger.warning("%s cannot be written to: the C code is compiled for this process alone", folder)
            folder = None
    made = (folder or temporary) / f"{made_from}.{os.getpid()}.so"
    compile_library(compiler, made, _native(), sources=sources)
    return made.replace(_named(made, made_from))


def _named(path: Path, made_from: str) -> Path:
    """The path that the file must have by its content."""
    return path.with_name(f"{made_from}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.so")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded: {error}") from error


def _digest(compiler: str, sources: Iterable[Path] = FILES) -> str:
    """The digest of the sources, the compiler, its options and this CPU's instructions, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted((*sources, *SOURCES.glob("*.h"), *(_include_folder() / "xla/ffi/api").glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{compiler} --version failed: {error}") from error
    for fact in (version.stdout, FLAGS, _native(), platform.machine(), _cpu()):
        digest.update(f"{fact!r}\n".encode())
    return digest.hexdigest()[:32]


def _include_folder() -> Path:
    """`jax.ffi.include_dir()`, without an import."""
    found = find_spec("jaxlib")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "include"


def _native() -> str:
    """The compiler's option for this CPU's instructions."""
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _cpu() -> str:
    """The instruction sets of this CPU, as Linux lists them. On other systems it is the CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    listed = [line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name")]
    return "\n".join(sorted(set(listed)))
