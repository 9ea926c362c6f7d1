"""The tests run on the CPU, whatever chip or plug-in is here, with eight CPU devices so that sharded code can run.

`scripts/test` runs them in one process more than there are cores (pytest-xdist). Programs are compiled once for all
processes, and kept from one run to the next.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

import tests.examples  # noqa: F401, for its profiles of hypothesis

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; children inherit it
# Programs compile in a quarter of the time, to slower code: most programs of tests run a few times only. A child with
# `AS_FOR_USERS` in its environment compiles without these flags. All others have them: JAX keeps programs by the flags
# in the environment, so processes with the same flags share what they have compiled.
_QUICKLY = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # LLVM takes a program whole: parts for threads cost a seventh more
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
_given = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in _QUICKLY]  # a worker inherits them
if not any("xla_force_host_platform_device_count" in flag for flag in _given):
    _given.append("--xla_force_host_platform_device_count=8")
AS_FOR_USERS = {"XLA_FLAGS": " ".join(_given)}
if "COMPILE_AS_FOR_USERS" in os.environ:  # with the quick flags, some faults do not show (bits of a NaN)
    os.environ |= AS_FOR_USERS
else:
    os.environ["XLA_FLAGS"] = " ".join([*_given, *_QUICKLY])
# Of a child that asks for its own number of devices.
ANY_DEVICES = {"XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)}
COMPILED = Path(__file__).parents[1] / ".pytest_cache/d/compiled"
# JAX can keep a limit, too. For that it reads the whole folder whenever it stores a program.
MAX_COMPILED_BYTES = 1 << 30
os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(COMPILED), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

KERNELS = Path(__file__).parent / "pallas_kernels"
COMPILING_FOR_CHIPS = ("test_compile.py", "test_compile_gpu_step.py")
INTERPRETED = "test_interpreted.py"
E2E = Path(__file__).parent / "e2e"
LAB = Path(__file__).parent / "lab"
# Whole folders and files that have a mark. Where the mark is left out they are not imported: other people's clients
# take seconds to import, in every process.
OF_ONE_MARK = {
    "kernels": [KERNELS],
    "lab": [LAB],
    "clients": [E2E / f"test_{name}.py" for name in ("langchain", "litellm", "page")],
}
MAX_PROCESSES = 4  # each imports JAX and holds programs: up to two gigabytes


def pytest_sessionstart(session: pytest.Session) -> None:
    is_first = "PYTEST_XDIST_WORKER" not in os.environ  # which workers have, and what their tests start
    if is_first and sum(path.stat().st_size for path in COMPILED.rglob("*")) > MAX_COMPILED_BYTES:
        shutil.rmtree(COMPILED)
    COMPILED.mkdir(parents=True, exist_ok=True)
    COMPILED.chmod(0o700)  # a server refuses a folder that others can write to


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        any(collection_path in paths and f"not {mark}" in config.option.markexpr for mark, paths in OF_ONE_MARK.items())
        or None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark, paths in OF_ONE_MARK.items():
            if any(path in (item.path, *item.path.parents) for path in paths):
                item.add_marker(mark)
    if hasattr(config, "workerinput"):  # the longest first, so that no process ends much later than the others
        items.sort(key=lambda item: not any(map(item.get_closest_marker, ("slow", "e2e", "kernels"))))


def pytest_collection_finish() -> None:
    """Hides modules and tests from the garbage collector, which otherwise reads them all in each full collection."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """A process runs many files, and what JAX has compiled for one is of no use to the next: gigabytes otherwise."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


class ByFile(LoadScopeScheduling):
    """Tests of one file run in one process, one after the other: what they compile and start is made once.

    All of `e2e` share a server. Tests that compile for chips share nothing: each takes a process of its own a minute.
    Interpreted kernels take ten minutes of a core in all; the cases of one test share programs.
    """

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
        super().__init__(config, log)

    def remove_node(self, node: WorkerController) -> str | None:
        """A test that ended its process is not run again: one that hangs would hold the next process just as long."""
        workload = self.assigned_work[node]
        crashed = super().remove_node(node)
        for unit in workload.values():
            if crashed in unit:
                unit[crashed] = True
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if path.name in COMPILING_FOR_CHIPS:
            return nodeid
        if path.name == INTERPRETED:
            return nodeid.partition("[")[0]
        return str(path.parent if path.parent.name == "e2e" else path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: none but pytest's own process (0) where paths are given or output is shown as it comes."""
    if config.args_source is pytest.Config.ArgsSource.ARGS or config.option.capture == "no":
        return 0
    return min((os.cpu_count() or 1) + 1, MAX_PROCESSES)  # tests of servers mostly wait
