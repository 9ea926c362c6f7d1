"""Packs the tree and packages for a machine that has jax and flax but cannot fetch anything.

The kit is a tar file with the tree in `pallas-serve/`. In `pallas-serve/kit/packages` are the packages that the tree
needs besides jax, flax and what these need themselves. `pallas-serve/scripts/check` finds them there.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from scripts.flags.errors import FailedError
from scripts.lab.chip.parts import ROOT

PACKAGE = "pallas-serve"
THERE = ("jax", "jaxlib", "flax")  # on the machine, with all that they need
MAX_BYTES = 60 << 20
LEFT_OUT = ("tests/", "scripts/lab/results/")  # of the tree
# Of wheels for another Python: 64-bit Linux with the glibc of Ubuntu 22.04 or newer.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)), "manylinux2014_x86_64")
Distribution = importlib.metadata.Distribution


def make_kit(path: Path, python: str | None = None) -> str:
    """Writes the kit, and returns a line about it.

    Args:
        python: the machine's version of Python, such as "3.12". Packages for another version than this Python's are
            downloaded by pip; those for this one are taken from this environment.

    Raises:
        FailedError: the packages cannot be downloaded, or the kit is too large.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    needed = missing_packages()
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder)
        if python in (None, here):
            for distribution in needed:
                _copy(distribution, packages)
        else:
            _download(needed, str(python), packages)
        _write_own_metadata(packages)
        with tarfile.open(path, "w:gz", compresslevel=6) as tar:
            for name in _tree():
                tar.add(ROOT / name, f"{PACKAGE}/{name}", recursive=False)
            tar.add(packages, f"{PACKAGE}/kit/packages")
            commit = _git("rev-parse", "HEAD").encode()
            entry = tarfile.TarInfo(f"{PACKAGE}/kit/commit")
            entry.size = len(commit)
            tar.addfile(entry, io.BytesIO(commit))
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise FailedError(f"{path} has {size / 2**20:.0f} MiB, more than the {MAX_BYTES >> 20} that it may have")
    return (
        f"{path}: {size / 2**20:.1f} MiB, {len(needed)} packages for Python {python or here}. On the machine:\n"
        f"  tar xf {path.name} && {PACKAGE}/scripts/check"
    )


def missing_packages() -> list[Distribution]:
    """What this package needs at run time, without `THERE` and what those need. By name."""
    needed = _closure(_names(_project()["dependencies"]))
    there = _closure(THERE)
    return [needed[name] for name in sorted(needed.keys() - there.keys())]


def _project() -> dict[str, Any]:
    """The project's table in pyproject.toml, which is newer than an installation's metadata may be."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _closure(names: Iterable[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = _normalised(waiting.pop())
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            waiting += _names(found[name].requires or [])
    return found


def _names(requirements: Iterable[str]) -> list[str]:
    """The names of those requirements that hold without extras."""
    parsed = map(Requirement, requirements)
    return [r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _copy(distribution: Distribution, folder: Path) -> None:
    """Copies the installed files, without commands and compiled bytecode."""
    for file in distribution.files or []:
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        source, target = Path(str(file.locate())), folder / file
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def _download(needed: list[Distribution], python: str, folder: Path) -> None:
    """Downloads the wheels with pip, at the versions of this environment, and unpacks them."""
    with tempfile.TemporaryDirectory() as wheels:
        command = [
            *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary", ":all:", "--python-version", python, "--dest", wheels),
            *(flag for name in PLATFORMS for flag in ("--platform", name)),
            *(f"{distribution.name}=={distribution.version}" for distribution in needed),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise FailedError(
                f"pip could not download the packages for Python {python} ({last}); without a network, a kit can be "
                f"made for Python {sys.version_info.major}.{sys.version_info.minor} only"
            )
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def _write_own_metadata(folder: Path) -> None:
    """The metadata of the tree itself, where the server reads its version."""
    version = _project()["version"]
    target = folder / f"{PACKAGE.replace('-', '_')}-{version}.dist-info"
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")


def _tree() -> list[str]:
    """The files of the tree that git knows, or does not ignore."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return [name for name in names if not name.startswith(LEFT_OUT) and (ROOT / name).is_file()]


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise FailedError(f"a kit is made from a git checkout, and git says: {error}") from error
