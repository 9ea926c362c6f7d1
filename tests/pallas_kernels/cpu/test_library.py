"""Where the library comes from, and what is said where it cannot be made. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.cpu import library
from tests.c_compiler import compiler

CC = compiler()

LOAD = """
import os, sys
from pathlib import Path
from pallas_kernels.cpu import library
from pallas_kernels.errors import UnavailableError
library.COMPILE_TIMEOUT_S = float(os.environ.get("LIMIT_S", library.COMPILE_TIMEOUT_S))
if begun := os.environ.get("EARLY"):
    library.start_compiling(Path(sys.argv[1]))
    while not Path(begun).exists():
        pass
    assert "jax" not in sys.modules
try:
    library.load(Path(sys.argv[1]) if sys.argv[1:] else None, four_bit=bool(sys.argv[2:]))
except UnavailableError as error:
    print(error)
except ValueError as error:
    print("ends the start:", error)
else:
    print("loaded")
"""


def load(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", LOAD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_made_once(tmp_path):
    """Two processes that start at once, and a third one, whose compiler would fail."""
    folder, own = tmp_path / "native", tmp_path / "cc"
    script(own, f'exec {CC} "$@" -O0')
    command = [sys.executable, "-c", LOAD, str(folder)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CC": str(own)})
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["loaded", "loaded"]
    (kept,) = folder.iterdir()
    assert kept.suffix == ".so"
    script(own, f'test "$1" = --version && exec {CC} "$@"; exit 1')
    assert load(str(folder), CC=str(own)) == "loaded"
    assert load(str(tmp_path / "other"), CC=str(own)) == f"{own} could not compile the C code: no message"


def test_the_products_in_four_bits_are_compiled_where_weights_need_them(tmp_path):
    folder, calls = tmp_path / "native", tmp_path / "calls"
    own = script(tmp_path / "cc", f'echo "$@" >>{calls}; exec {CC} "$@" -O0')
    assert load(str(folder), CC=own) == "loaded"
    assert "products.c" in calls.read_text() and "four_bit.c" not in calls.read_text()
    calls.write_text("")
    assert load(str(folder), "four bits", CC=own) == "loaded"
    assert "four_bit.c" in calls.read_text() and "products.c" not in calls.read_text()  # which is there
    assert len(list(folder.iterdir())) == 2
    calls.write_text("")
    assert load(str(folder), "four bits", CC=own) == "loaded"
    assert ".c " not in calls.read_text()


def test_the_files_are_compiled_at_once(tmp_path):
    """Each compiler ends only after all of them have begun."""
    begun = tmp_path / "begun"
    begun.mkdir()
    own = script(
        tmp_path / "cc",
        rf"""case "$*" in *.c\ *)
touch {begun}/$$; while [ "$(ls {begun} | wc -l)" -lt {len(library.FILES)} ]; do sleep 0.05; done ;;
esac
exec {CC} "$@" -O0""",
    )
    assert load(str(tmp_path / "native"), "four bits", CC=own) == "loaded"


@pytest.mark.parametrize(
    ("ends", "said"), [("", "loaded"), ("exit 1", "{own} could not compile the C code: no message")]
)
def test_the_compiler_starts_before_jax_is_imported(tmp_path, ends, said):
    """No file is compiled twice, and `load` raises what the compiler says. After a failure some are not begun."""
    folder, calls = tmp_path / "native", tmp_path / "calls"
    folder.mkdir()
    own = script(tmp_path / "cc", f'case "$*" in *.c\\ *) echo "$@" >>{calls}; {ends} ;; esac; exec {CC} "$@" -O0')
    assert load(str(folder), CC=own, EARLY=str(calls)) == said.format(own=own)
    compiled = calls.read_text().splitlines()
    assert len(set(compiled)) == len(compiled)
    assert len(compiled) == len(library.FILES) - 1 or ends


def test_a_compiler_that_takes_too_long_is_a_choice_and_no_slow_start(tmp_path):
    own = script(tmp_path / "cc", rf'case "$*" in *.c\ *) exec sleep 60 ;; esac; exec {CC} "$@"')
    said = load(str(tmp_path / "native"), CC=own, LIMIT_S="0.5")
    assert said.startswith(
        f"ends the start: {own} has not compiled the C code in 0.5 s: name another compiler by the variable CC"
    )
    assert "or choose --attention-backend reference" in said


def test_without_a_folder_nothing_is_kept(tmp_path):
    quickly = script(tmp_path / "cc", f'exec {CC} "$@" -O0')
    (tmp_path / "empty").mkdir()
    assert load(CC=quickly, TMPDIR=str(tmp_path / "empty")) == "loaded"
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PATH": "/", "CC": ""}, "there is no C compiler (cc, gcc, clang) on the PATH: install one, such as gcc"),
        ({"CC": "/nowhere/cc"}, "CC=/nowhere/cc is not a program: install one, such as gcc"),
    ],
)
def test_a_machine_without_a_compiler(tmp_path, environment, said):
    assert load(str(tmp_path), **environment) == said


def test_a_compiler_that_fails_is_quoted(tmp_path):
    own = script(tmp_path / "cc", f'test "$1" = --version && exec {CC} "$@"; echo "no such target" >&2; exit 1')
    assert load(str(tmp_path), CC=own) == f"{own} could not compile the C code: no such target"
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


def cut(kept: Path) -> None:
    os.truncate(kept, kept.stat().st_size // 2)


def empty(kept: Path) -> None:
    os.truncate(kept, 0)


def foreign(kept: Path) -> None:
    """A library of other functions."""
    subprocess.run([CC, "-shared", "-fPIC", "-x", "c", "-", "-o", kept], input=b"int other;", check=True)


@pytest.mark.parametrize("damage", [cut, empty, foreign])
def test_a_damaged_library_is_made_again(tmp_path, damage):
    """Loading a library that was cut off ends the process by a signal."""
    folder, quickly = tmp_path / "native", script(tmp_path / "cc", f'exec {CC} "$@" -O0')
    assert load(str(folder), CC=quickly) == "loaded"
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    damage(kept)
    assert load(str(folder), CC=quickly) == "loaded"
    assert [path.read_bytes() for path in folder.iterdir()] == [whole]


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    assert load(str(tmp_path / "file" / "native"), CC=script(tmp_path / "cc", f'exec {CC} "$@" -O0')) == "loaded"
