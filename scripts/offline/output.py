"""The output of a batch run: a file, or an object in a bucket, whose contents are prepared on this machine.

An object cannot grow. So the journal of a run that writes to a bucket is a file on this machine. It is regularly copied
to OUTPUT.partial in the bucket, so another machine can continue the run when this one is gone.

An existing output is replaced only by a run with --overwrite, and only if it is the version that existed when the run
began. If two machines write the same output, the one that began last continues. The other one checks before each write,
and ends when it finds a copy or an output that it does not know. Only the creation of an object is atomic in a bucket,
so two machines that replace an object within milliseconds may both believe that they were first.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from scripts.offline.journal import Journal

SECONDS_BETWEEN_COPIES = 60.0  # at least
_SHARE_OF_COPYING = 0.05  # at most, of the time


class Output:
    """The output of a run.

    Args:
        place: the path of a file, or the URL of an object.
        work: a folder on this machine, for the journals of runs that write to buckets.

    Raises:
        ValueError: no file can be written at this place.
    """

    def __init__(self, place: Place, work: Path) -> None:
        self._copy_version: str | None = None  # of the copy that this run has read or written; None: there was none
        self._is_copy_known = True  # not after a write that has failed, and perhaps not
        # The target of a link is written.
        self.place: Place = place if isinstance(place, RemotePath) else Path(os.path.realpath(place))
        _check(self.place)
        if isinstance(self.place, RemotePath):
            folder = work / hashlib.sha256(str(self.place).encode()).hexdigest()[:32]
            folder.mkdir(parents=True, exist_ok=True)
            local = folder / self.place.name
        else:
            local = self.place
        self.partial = Path(f"{local}.partial")  # the journal
        self.ordered = Path(f"{local}.ordered")  # collects the ordered records before it becomes the output

    def version(self) -> str | None:
        """A text that changes when the output changes; None: there is no output."""
        return _version(self.place)

    def local_files(self) -> tuple[Path, ...]:
        own = (self.partial, self.ordered)
        return own if isinstance(self.place, RemotePath) else (self.place, *own)

    def fetch_journal(self, journal: Journal) -> None:
        """Adds the records that another machine has left in the bucket to the journal. Raises ValueError if they belong
        to another run."""
        copy = self._copy()
        if copy is None:
            return
        self._copy_version = _version(copy)
        if self._copy_version is None:
            return
        fetched = self.partial.with_name(f"{self.partial.name}.fetched")
        try:
            copy.copy_to(fetched)
            with Journal(fetched, name=copy) as other:
                journal.take_in(other)
        finally:
            fetched.unlink(missing_ok=True)

    def forget_journal(self) -> None:
        """Lets this run replace the copy in the bucket."""
        copy = self._copy()
        self._copy_version = None if copy is None else _version(copy)

    def check_may_go_on(self, replaces: str | None) -> None:
        """Raises ValueError if an output exists that is not the version `replaces`."""
        if self.version() not in (None, replaces):
            raise ValueError(self._objection())

    @contextmanager
    def kept(self, journal: Journal) -> Iterator[None]:
        """Copies the journal to the bucket regularly while the context is open. A run that ends early leaves the last
        copy there."""
        copy = self._copy()
        if copy is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._keep_copying, args=(copy, journal, ended), name="journal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if journal.is_finished:
                copy.unlink(missing_ok=True)
            elif not journal.is_empty:
                self._upload(copy, journal)

    def publish(self, replaces: str | None) -> None:
        """Makes the output of the file `ordered`.

        Args:
            replaces: the version of the output that may be replaced; None: none.

        Raises:
            ValueError: another run has written the output, or is writing it.
        """
        version = self.version()
        if version not in (None, replaces):
            if not self._is_published():
                raise ValueError(self._objection())
        elif not isinstance(self.place, RemotePath):
            self.ordered.replace(self.place)
        else:
            copy = self._copy()
            assert copy is not None
            try:
                if self._is_taken(copy):
                    raise FileExistsError
                self.place.copy_from(self.ordered, is_new=version is None)
            except FileExistsError as error:
                raise ValueError(self._objection()) from error

    def _is_published(self) -> bool:
        """Whether the output holds these records: an earlier process of this run ended just after it wrote them."""
        if not isinstance(self.place, RemotePath):
            return filecmp.cmp(self.ordered, self.place, shallow=False)
        published = self.ordered.with_name(f"{self.ordered.name}.fetched")
        try:
            self.place.copy_to(published)
            return filecmp.cmp(self.ordered, published, shallow=False)
        finally:
            published.unlink(missing_ok=True)

    def _is_taken(self, copy: RemotePath) -> bool:
        """Whether another run has written the copy of the journal since this one has."""
        return self._is_copy_known and _version(copy) != self._copy_version

    def _objection(self) -> str:
        return (
            f"another run writes {self.place}, or has written it since this one began. This run ends; its records are "
            f"in {self.partial}. If {self.place} is there, move it away; then the same command without --overwrite "
            "goes on"
        )

    def _copy(self) -> RemotePath | None:
        place = self.place
        return place.with_name(f"{place.name}.partial") if isinstance(place, RemotePath) else None

    def _keep_copying(self, copy: RemotePath, journal: Journal, ended: threading.Event) -> None:
        wait_s, num_bytes = SECONDS_BETWEEN_COPIES, 0
        while not ended.wait(wait_s):
            if self.partial.exists() and self.partial.stat().st_size != num_bytes:
                num_bytes, started = self.partial.stat().st_size, time.monotonic()
                self._upload(copy, journal)
                wait_s = max(SECONDS_BETWEEN_COPIES, (time.monotonic() - started) / _SHARE_OF_COPYING)

    def _upload(self, copy: RemotePath, journal: Journal) -> None:
        """Copies the journal to the bucket. A failure is only reported on stderr, because the journal is on this
        machine."""
        still = self.partial.with_name(f"{self.partial.name}.copy")
        try:
            if self._is_taken(copy):
                raise FileExistsError
            shutil.copyfile(self.partial, still)  # the journal grows meanwhile
            is_new, self._is_copy_known = self._is_copy_known and self._copy_version is None, False
            copy.copy_from(still, is_new=is_new)
            self._copy_version, self._is_copy_known = _version(copy), True
        except FileExistsError:
            journal.stop(self._objection())
        except (OSError, ValueError) as error:
            print(f"the finished records are on this machine only: {error}", file=sys.stderr)
        finally:
            still.unlink(missing_ok=True)


def _version(place: Place) -> str | None:
    try:
        if isinstance(place, RemotePath):
            return place.version()
        status = place.stat()
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
    except FileNotFoundError:
        return None


def _check(output: Place) -> None:
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: name a file in it")
    if isinstance(output, RemotePath):
        output.check_bucket()
        return
    if output.exists() and not output.is_file():
        raise ValueError(f"--output {output} is a device or a pipe: the records need a file")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
