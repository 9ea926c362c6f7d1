"""The tests run on the CPU, whatever chip or plug-in is here, with eight CPU devices so that sharded code can run."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; children inherit it
_COUNT = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}".strip()

KERNELS = [Path(__file__).parent / "pallas_kernels" / room for room in ("gpu", "tpu")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(room in item.path.parents for room in KERNELS):
            item.add_marker(pytest.mark.kernels)
