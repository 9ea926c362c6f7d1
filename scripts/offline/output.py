"""The output of a batch run: a file, or an object in a bucket, whose contents are prepared on this machine.

An object cannot grow, so the journal of a run that writes to a bucket is a file on this machine. An existing output is
replaced only by a run with --overwrite, and only if it is the version that existed when the run began.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
from pathlib import Path

from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from model.loading.remote_tensors import readable


class Output:
    """The output of a run.

    Args:
        place: the path of a file, or the URL of an object.
        work: a folder on this machine, for the journals of runs that write to buckets.

    Raises:
        ValueError: no file can be written at this place.
    """

    def __init__(self, place: Place, work: Path) -> None:
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
        try:
            return readable(self.place).version()
        except FileNotFoundError:
            return None

    def local_files(self) -> tuple[Path, ...]:
        own = (self.partial, self.ordered)
        return own if isinstance(self.place, RemotePath) else (self.place, *own)

    def check_may_go_on(self, replaces: str | None) -> None:
        """Raises ValueError if an output exists that is not the version `replaces`."""
        if self.version() not in (None, replaces):
            raise ValueError(self._objection())

    def publish(self, replaces: str | None) -> None:
        """Makes the output of the file `ordered`.

        Args:
            replaces: the version of the output that may be replaced; None: none.

        Raises:
            ValueError: another run has written the output.
        """
        version = self.version()
        if version not in (None, replaces):
            if not self._is_published():
                raise ValueError(self._objection())
        elif not isinstance(self.place, RemotePath):
            self.ordered.replace(self.place)
        else:
            try:
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

    def _objection(self) -> str:
        return (
            f"another run has written {self.place} since this one began. This run ends; its records are in "
            f"{self.partial}. Move {self.place} away; then the same command without --overwrite goes on"
        )


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
