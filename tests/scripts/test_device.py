"""Which device jax is started on, in processes of their own, with NVIDIA drivers made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.compiling.compiler_options import ALLOCATOR_VARIABLE
from scripts.building.device import HAS_MAPPED_MEMORY, HOST_LIMIT_VARIABLE, start_jax
from scripts.flags.settings import EngineSettings
from tests.c_compiler import compiler

START = """
import sys
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
try:
    print(start_jax(EngineSettings(device=sys.argv[1], compile_cache="none")))
except ValueError as error:
    print(error)
"""


def start(device: str, drivers: Path) -> str:
    """The platform, or why there is none."""
    command, environment = [sys.executable, "-c", START, device], {"LD_LIBRARY_PATH": str(drivers)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_system_than_linux_is_refused_in_one_line(monkeypatch):
    """A server that was started without scripts/serve, or an `LLM`."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"^pallas-serve needs Linux, and this is darwin: run it in a container .*$"):
        start_jax(EngineSettings(device="cpu"))


def make_driver(folder: Path, *, version: int, init: int, count: int, maps: int = HAS_MAPPED_MEMORY) -> None:
    code = f"""int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
int cuInit(unsigned flags) {{ return {init}; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{ *value = attribute == {maps}; return 0; }}
int cuDeviceGet(int *device, int number) {{ *device = number; return number > 1; }}
int cuDevicePrimaryCtxRetain(void **context, int device) {{ *context = (void *)0x7000; return 0; }}
int cuCtxPushCurrent_v2(void *context) {{ return context != (void *)0x7000; }}
int cuMemGetInfo_v2(unsigned long *free, unsigned long *total) {{ *free = 70ul << 30; *total = 80ul << 30; return 0; }}
int cuCtxPopCurrent_v2(void **context) {{ return 0; }}
int cuDevicePrimaryCtxRelease_v2(int device) {{ return 0; }}"""
    command = [compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=code, text=True, check=True)


def test_without_a_driver_cuda_is_refused(tmp_path):
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    said = start("cuda", tmp_path)
    assert said.startswith("no cuda device can be used: there is no NVIDIA driver here (libcuda.so.1: ")
    assert "start the container with `--gpus all`" in said


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({"version": 12080, "init": 0, "count": 1}, "the NVIDIA driver is for CUDA 12.8, and CUDA 13 is needed"),
        ({"version": 13000, "init": 100, "count": 0}, "no GPU is visible (CUDA's error 100)"),
        ({"version": 13000, "init": 0, "count": 0}, "no GPU is visible (CUDA_VISIBLE_DEVICES hides all)"),
        ({"version": 13000, "init": 0, "count": 1}, "jax finds only cpu here"),  # and has no plug-in that works
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_words(tmp_path, driver, words):
    make_driver(tmp_path, **driver)
    assert start("cuda", tmp_path).startswith(f"no cuda device can be used: {words}")


def test_a_server_for_gpus_does_not_serve_without_one(tmp_path):
    make_driver(tmp_path, version=13000, init=100, count=0)
    command = [sys.executable, "-m", "scripts.launch", "--device", "cuda", "--port", "0"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, "ready after" in done.stdout) == (2, False)
    said = "scripts/serve: The engine could not start: no cuda device can be used: no GPU is visible"
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


ALLOCATOR = """
import os
import jax
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
def devices():  # jax starts XLA's client here
    raise RuntimeError(f"{os.environ['XLA_PYTHON_CLIENT_ALLOCATOR']} {os.environ['XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB']}")
jax.devices = devices
try:
    start_jax(EngineSettings(device="cuda", compile_cache="none", models=["a=b"], models_host_memory=99.5))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("maps", "given", "expected"),
    [
        (HAS_MAPPED_MEMORY, {}, "vmm 164"),
        (0, {}, "default 164"),
        (HAS_MAPPED_MEMORY, {ALLOCATOR_VARIABLE: "default"}, "default 164"),
        (0, {HOST_LIMIT_VARIABLE: "7"}, "default 7"),
    ],
)
def test_the_allocators_are_chosen_before_jax_starts(tmp_path, maps, given, expected):
    """A graph need not be updated for memory that is mapped. Pinned memory has room for models. A user's own choice
    stays."""
    make_driver(tmp_path, version=13000, init=0, count=1, maps=maps)
    chosen = {ALLOCATOR_VARIABLE, HOST_LIMIT_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path)} | given
    command = [sys.executable, "-c", ALLOCATOR]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == f"no cuda device can be used: {expected}\n"


MEMORY = """
import sys
from types import SimpleNamespace
from model.execution.device_memory import device_memory
from scripts.building.device import check_cuda
gpu = SimpleNamespace(
    platform="gpu", client=SimpleNamespace(runtime_type=""), memory_stats=dict, local_hardware_id=int(sys.argv[1])
)
print(check_cuda())
memory = device_memory(gpu)
print(memory.total / 2**30, memory.free / 2**30)
"""


@pytest.mark.parametrize(("maps", "known"), [(HAS_MAPPED_MEMORY, "True"), (0, "False")])
def test_a_gpus_memory_is_asked_of_the_driver(tmp_path, maps, known):
    """jax counts no memory that is mapped. A part of it is left for what is no array."""
    make_driver(tmp_path, version=13000, init=0, count=2, maps=maps)
    command, environment = [sys.executable, "-c", MEMORY, "1"], os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    said, memory = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    assert said == known
    assert [float(gib) for gib in memory.split()] == pytest.approx([80 * 0.92, 70 - 80 * 0.08])
    command[-1] = "2"
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert "GPU 2 does not report its memory (CUDA's error 1): use --num-pages" in refused.stderr
