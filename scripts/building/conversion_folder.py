"""The folder that a conversion writes. What a killed conversion has left in it is replaced; nothing else is touched."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from model.inputs.gguf import GgufFile
from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from model.inputs.words import shown
from model.loading.gguf_config import hf_config
from model.loading.source import UNFINISHED
from model.loading.stored_weights import CONVERTED
from server.text.gguf_tokenizer import read_gguf_tokenizer

CONFIG = "config.json"
_UNCERTAIN = "holds an unfinished conversion, which may be running: delete it if not, or name another folder"


@contextmanager
def claimed(folder: Place, names: Sequence[str]) -> Iterator[None]:
    """Makes the folder, for a conversion that writes the weights, the files `names` and at last `CONFIG`.

    Until the end the folder holds the file `UNFINISHED`, which lists the names and which this process has locked. After
    an error the folder is as it was. Buckets, and some file systems, have no locks. An unfinished conversion cannot be
    told there from one that runs, and the folder must be new.

    Raises:
        ValueError: the folder holds something else than an unfinished conversion, or another process converts into it.
    """
    if isinstance(folder, RemotePath):
        _check_new(folder)
        yield
        return
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not is_new and not (folder / UNFINISHED).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / UNFINISHED).open("a+b") as mark:
        _lock(mark, folder)
        _remove(folder, _listed(mark))
        mark.truncate(0)
        mark.write(json.dumps([*names]).encode())
        mark.flush()
        try:
            yield
        except BaseException:
            _remove(folder, names)
            (folder / UNFINISHED).unlink()
            if is_new:
                with suppress(OSError):  # someone else has put a file there
                    folder.rmdir()
            raise
        (folder / UNFINISHED).unlink()


def _check_new(folder: RemotePath) -> None:
    if not folder.exists():
        return
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if CONVERTED in found and CONFIG not in found:
        raise ValueError(f"{folder} {_UNCERTAIN}")
    raise ValueError(f"{folder} is not an empty folder")


def _lock(mark: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(mark.fileno()), (folder / UNFINISHED).stat())
    except BlockingIOError as error:
        raise ValueError(f"another process converts into {folder}") from error
    except FileNotFoundError:
        is_there = False
    except OSError as error:  # a file system without locks
        if mark.seek(0, os.SEEK_END):
            raise ValueError(f"{folder} {_UNCERTAIN}") from error
        is_there = True
    if not is_there:  # another process has ended its conversion since it was opened
        raise ValueError(f"{folder} is not an empty folder")


def _listed(mark: BinaryIO) -> list[str]:
    """The names of the files that a killed conversion was to write. There are none if it was killed while it wrote the
    mark: it has then written nothing else."""
    mark.seek(0)
    try:
        listed = json.loads(mark.read())
    except (ValueError, RecursionError):
        return []
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _remove(folder: Path, names: Sequence[str]) -> None:
    """Removes what a conversion has written, all but its mark. ValueError, and nothing is removed, if the folder holds
    anything else."""
    of_files = re.compile(rf"({'|'.join(map(re.escape, (*names, CONFIG)))})(\.\d+)?")  # `write_whole` adds a number
    found = [path for path in folder.iterdir() if path.name != UNFINISHED]
    others = sorted(path.name for path in found if path.name != CONVERTED and not of_files.fullmatch(path.name))
    if others:
        raise ValueError(
            f"{folder} holds an unfinished conversion and other files ({shown(others)}): name another folder"
        )
    for path in found:
        if path.name == CONVERTED and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def gguf_small_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The content of `config.json`, and the tokenizer's files by name, of a GGUF file. ValueError if its metadata
    cannot be used."""
    tokenizer = read_gguf_tokenizer(path)
    template = tokenizer.chat_templates.for_transformers()
    settings = tokenizer.variables | ({"chat_template": template} if template else {})
    files = {
        "tokenizer.json": tokenizer.backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
    return hf_config(GgufFile.read(path)), files
