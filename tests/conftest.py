"""The tests run on the CPU, whatever chip or plug-in is here, with eight CPU devices so that sharded code can run."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports jax; children inherit it
_COUNT = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}".strip()
