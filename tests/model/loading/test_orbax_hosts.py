"""A conversion on the chips of two hosts: two processes with four CPU devices each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.loading.orbax_format import save_orbax
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from tests.conftest import ANY_DEVICES
from tests.model.loaded import flat
from tests.model.loading.test_orbax_format import wide
from tests.server.engine.hosts.loopback import free_port

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
HOST = """
import json, sys
import jax
import numpy as np
import tensorstore as ts
folder, port, number = sys.argv[1], *map(int, sys.argv[2:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
from flax import nnx
from model.config import LlamaConfig
from model.loading.orbax_format import OrbaxFiles
from model.loading.weights import load
from model.network.sharding import make_mesh
files = OrbaxFiles(folder + "/orbax", LlamaConfig.from_file(folder))
model = load(files, dtype="bfloat16", mesh=make_mesh(8))
(metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
held = {}
for path, variable in nnx.to_flat_state(nnx.state(model)):
    shards = variable.get_value().addressable_shards
    held[".".join(map(str, path))] = np.stack([np.asarray(shard.data).view(np.uint16) for shard in shards])
np.savez(f"{folder}/{number}.npz", **held)
print(json.dumps({"bytes_read": metric["values"][0]["value"]}))
"""


def test_each_host_reads_what_its_chips_hold_and_nothing_twice_but_shared_heads(tmp_path):
    """Eight chips, two heads of keys and values: each host has one of both."""
    folder = wide(tmp_path / "hf", "bf16", hidden_size=256)
    config = LlamaConfig.from_file(folder)
    model = load_hf(folder, config, dtype=jnp.bfloat16)
    save_orbax(model, folder / "orbax", config)
    environment = os.environ | ANY_DEVICES | {"PYTHONPATH": str(ROOT)}
    command, port = [sys.executable, "-c", HOST, str(folder), str(free_port())], subprocess.PIPE
    hosts = [
        subprocess.Popen([*command, str(number)], cwd=ROOT, env=environment, stdout=port, stderr=port, text=True)
        for number in range(2)
    ]
    answers = [host.communicate(timeout=300) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], answers
    expected = flat(load_hf(folder, config, dtype=jnp.bfloat16, mesh=make_mesh(8)))
    needed = sum(value.nbytes for value in flat(model).values() if value.ndim == 2) / 2
    for number, (out, _) in enumerate(answers):
        with np.load(folder / f"{number}.npz") as held:
            for name, value in expected.items():
                axis = 1 if name.endswith(("attention.out.kernel", "mlp.down.kernel")) else 0
                parts = np.split(value, 8, axis) if value.ndim == 2 else [value] * 8
                wanted = np.stack(parts[4 * number : 4 * number + 4]).view(np.uint16)
                np.testing.assert_array_equal(held[name], wanted)
        assert needed <= json.loads(out.splitlines()[-1])["bytes_read"] < 1.15 * needed  # and tables, and norms
