"""Reads and writes files of object stores through fsspec. Errors are readable and name the URL."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from model.inputs.private_folders import writing_whole

GCS = "gs"
PIECE_BYTES = 16 << 20  # bytes of one request; a longer range is read in several at a time
_PIECES_AT_ONCE = 8  # pieces of a copied file that are read at a time
_PACKAGES = {GCS: "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}
_INSTALL = ".venv/bin/python -m pip install -c scripts/constraints.txt"
_NO_CREDENTIALS = (
    "no credentials for it: on a virtual machine of Google Cloud give the machine a service account with the scope "
    "cloud-platform; elsewhere run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
)


class Size(NamedTuple):
    """The result of `stat` for an object."""

    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of an object store. Its methods are those of `pathlib.Path`. A folder exists while it has files.
    All methods wait for the store, so none may be called on an event loop.

    Raises:
        FileNotFoundError: the object is not there.
        ValueError: the bucket is not there, access is denied, there are no credentials, the store cannot be reached,
            or an answer is shorter than asked for.
    """

    scheme: str
    path: str  # "bucket/folder/file"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.scheme, self.path.rpartition("/")[0])

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self) -> Size:
        return Size(self._file()["size"])

    def version(self) -> str:
        """A text that changes when the file does."""
        info = self._file()
        return repr(sorted((key, str(value)) for key, value in info.items() if key not in _NOT_OF_THE_CONTENT))

    def iterdir(self) -> Iterator[RemotePath]:
        """The files and folders in this folder, in the order of their names."""
        with _in_words(self):
            found = self._files().ls(self.path, detail=True)
        names = sorted(entry["name"].strip("/") for entry in found)
        return (RemotePath(self.scheme, name) for name in names if name != self.path)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The entries of this folder whose names match."""
        return (entry for entry in self.iterdir() if fnmatchcase(entry.name, pattern)) if self.is_dir() else iter(())

    def files(self) -> Iterator[RemotePath]:
        """All files in this folder and those below it; there may be none."""
        with _in_words(self):
            found = self._files().find(self.path)
        return (RemotePath(self.scheme, name.strip("/")) for name in found)

    def read_bytes(self) -> bytes:
        return bytes(self.read_range(0, self.stat().st_size))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, end: int) -> bytearray:
        """The bytes from `start` to `end`. Several requests at a time read pieces of them."""
        starts = range(start, end, PIECE_BYTES)
        ends = [min(first + PIECE_BYTES, end) for first in starts]
        with _in_words(self):
            options = {"on_error": "raise"}
            pieces = self._files().cat_ranges([self.path] * len(ends), [*starts], ends, **options) if ends else []
        content = bytearray().join(pieces)
        if len(content) != max(0, end - start):
            raise ValueError(
                f"{self}: {len(content)} bytes came of the {end - start} from {start} on: the file has become shorter, "
                "or the connection ended"
            )
        return content

    def copy_to(self, local: Path) -> None:
        """Copies the file to this machine, several pieces at a time. An incomplete copy is deleted."""
        size, version = self.stat().st_size, self.version()
        with writing_whole(local) as file:
            for start in range(0, size, _PIECES_AT_ONCE * PIECE_BYTES):
                file.write(self.read_range(start, min(start + _PIECES_AT_ONCE * PIECE_BYTES, size)))
            if self.version() != version:
                raise ValueError(f"{self} changed while it was copied: try again")

    def write_bytes(self, content: bytes) -> None:
        """Writes the file whole or not at all."""
        with self._writing():
            self._files().pipe_file(self.path, content)
        self._check_written(len(content))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def copy_from(self, local: Path, *, is_new: bool = False) -> None:
        """Uploads a file of this machine. The object is written completely or not at all.

        Args:
            is_new: raises FileExistsError if the object exists, even if another machine has written it just now.
        """
        with self._writing():
            self._files().put_file(str(local), self.path, mode="create" if is_new else "overwrite")
        self._check_written(local.stat().st_size)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, because an object store has no folders."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        with _in_words(self):
            try:
                self._files().rm_file(self.path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def check_bucket(self) -> None:
        """Raises ValueError if the bucket is not there or may not be listed."""
        with _in_words(self):
            if not self._has_bucket():
                raise ValueError(f"there is no bucket {self.bucket}")

    def _has_bucket(self) -> bool:
        options = {"max_results": 1} if self.scheme == GCS else {}
        try:
            self._files().ls(self.bucket, detail=False, **options)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with _in_words(self):
            try:
                yield
            except FileNotFoundError as error:
                raise ValueError(f"there is no bucket {self.bucket}") from error

    def _check_written(self, size: int) -> None:
        if (written := self.stat().st_size) != size:
            raise ValueError(f"{self} has {written} bytes, and {size} were written: write it again")

    def _info(self) -> dict[str, Any] | None:
        """The store's information about the file or folder; None if nothing is there."""
        with _in_words(self):
            try:
                found: dict[str, Any] = self._files().info(self.path)
                return found
            except FileNotFoundError:
                pass
            try:
                has_bucket = self._has_bucket()
            except Exception:  # of any type: who may read a folder need not be allowed to list the bucket
                return None
            if not has_bucket:
                raise ValueError(f"there is no bucket {self.bucket}")
            return None

    def _file(self) -> dict[str, Any]:
        info = self._info()
        if info is None or info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "there is no such file in the bucket", str(self))
        return info

    def _files(self) -> Any:
        return filesystem(self.scheme)


_NOT_OF_THE_CONTENT = ("timeStorageClassUpdated", "metageneration")


@cache
def filesystem(scheme: str) -> Any:
    """The fsspec file system of a URL's scheme. Raises ValueError if there is none, or its package is missing."""
    import fsspec

    if scheme == GCS:
        # Zonal buckets would be asked for over gRPC before every first access. Ranges of objects need none of it.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints errors that are also raised
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        how = f"run `{_INSTALL} {package}`" if package else str(error)
        raise ValueError(f"{scheme}:// needs a package that is not installed: {how}") from error
    except ValueError as error:
        raise ValueError(f"no package of fsspec is for {scheme}://") from error
    try:
        # A listing that was kept would hide what another machine has written since.
        return kind(use_listings_cache=False)
    except Exception as error:  # of any type: each client has its own
        raise ValueError(f"{scheme}:// cannot be used: {_reason(error)}") from error


@contextmanager
def _in_words(place: RemotePath) -> Iterator[None]:
    """Raises ValueError in place of the clients' many error types; FileNotFoundError and FileExistsError stay."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such file in the bucket", str(place)) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "the file is there already", str(place)) from error
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(place)) else f"{place}: {message}") from error
    except Exception as error:  # of any type: each client has its own
        raise ValueError(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    code = getattr(error, "code", None) or getattr(error, "status", None)
    message = str(error) or type(error).__name__
    origin = type(error).__module__
    if code == 401 or origin.startswith("google.auth") or type(error).__name__ == "NoCredentialsError":
        return f"{_NO_CREDENTIALS} ({message})"
    if code == 403 or isinstance(error, PermissionError) or message.startswith("Forbidden"):
        return f"no permission: {message.removeprefix('Forbidden: ')}"
    if isinstance(error, TimeoutError | ConnectionError) or origin.startswith(("aiohttp", "botocore", "requests")):
        return f"the store cannot be reached: {type(error).__name__}: {message}"
    return message
