"""Objects of pages in a bucket, which several machines may share. The methods are those of `LocalPages`.

A store has no times of use: after a start, pages are in the order in which they were written. An object is there once
its upload is complete, and nothing is left of an upload that has not ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from model.inputs.remote import RemotePath
from model.page_files.page_index import KeptPage

_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{32}\.page")


class BucketPages:
    """The objects of pages below a folder of a bucket. Other objects in it stay as they are.

    Args:
        flag: that names the folder, for errors.

    Raises:
        ValueError: there is no such bucket, or it cannot be listed.
    """

    def __init__(self, folder: RemotePath, flag: str) -> None:
        self._folder = folder
        try:
            folder.check_bucket()
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error

    def listed(self) -> Iterator[KeptPage]:
        for file in self._folder.files():
            if _NAME.fullmatch(file.name):
                yield KeptPage(file.name, file.st_size, file.st_mtime)

    def read(self, name: str, start: bytearray, page: memoryview) -> bool:
        """Fills `start` and `page` with the object. False: it is too short.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: it cannot be read.
        """
        file = self._folder / name
        size = len(start) + len(page)
        try:
            content = memoryview(file.read_range(0, size))
        except ValueError:
            if file.stat().st_size < size:
                return False
            raise
        start[:] = content[: len(start)]
        page[:] = content[len(start) :]
        return True

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        (self._folder / name).write_bytes(b"".join(parts))

    def touch(self, name: str) -> bool:
        """True: an object whose presence is known stays where it is."""
        return True

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
