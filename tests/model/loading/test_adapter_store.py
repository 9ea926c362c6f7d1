"""The adapters in the host's memory: their identities, and which of them are kept."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.loading.adapter_store import AdapterStore
from model.loading.hf_format import ADAPTER_CONFIG
from tests.model import adapters

NAMES = ("q_and_v", "rslora", "pattern")


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    return {name: Path(shutil.copytree(adapters.folder(name), tmp_path / name)) for name in NAMES}


def store(max_cpu: int = 8) -> AdapterStore:
    return AdapterStore(adapters.base_config(), max_rank=4, max_cpu=max_cpu)


def test_equal_contents_have_one_identity(folders, tmp_path):
    adapters_here = store()
    found = [adapters_here.load(folder) for folder in folders.values()]
    assert len(set(found)) == len(NAMES) and all(0 < identity < 2**63 for identity in found)
    copy = shutil.copytree(folders["rslora"], tmp_path / "copy")
    assert adapters_here.load(copy) == found[1] == store().load(copy)
    assert [adapters_here.weights(identity).identity for identity in found] == found


def test_the_least_recently_used_is_read_again(folders):
    adapters_here = store(max_cpu=2)
    first, second, third = (adapters_here.load(folders[name]) for name in NAMES[:2] + NAMES[:1])
    assert third == first
    third = adapters_here.load(folders["pattern"])  # in place of the second
    kept = adapters_here.weights(first)
    again = adapters_here.weights(second)  # in place of the third
    assert again.identity == second
    assert adapters_here.weights(first) is kept and adapters_here.weights(second) is again
    for folder in folders.values():
        shutil.rmtree(folder)
    assert adapters_here.weights(first) is kept
    with pytest.raises(ValueError, match=r"pattern has no adapter_config\.json"):
        adapters_here.weights(third)


@pytest.mark.parametrize("gone", ["q_and_v", "copy"])
def test_weights_are_read_from_any_folder_that_still_has_them(folders, tmp_path, gone):
    adapters_here = store(max_cpu=1)
    copy = shutil.copytree(folders["q_and_v"], tmp_path / "copy")
    identity = adapters_here.load(folders["q_and_v"])
    assert adapters_here.load(copy) == adapters_here.load(copy) == identity
    adapters_here.load(folders["rslora"])
    shutil.rmtree({"copy": copy, **folders}[gone])
    assert adapters_here.weights(identity).identity == identity
    adapters_here.load(folders["rslora"])
    shutil.copytree(folders["pattern"], copy, dirs_exist_ok=True)
    shutil.rmtree(folders["q_and_v"], ignore_errors=True)
    with pytest.raises(ValueError, match="copy has changed since it was loaded"):
        adapters_here.weights(identity)


def test_a_folder_that_has_changed_is_another_adapter(folders):
    adapters_here = store(max_cpu=1)
    old = adapters_here.load(folders["q_and_v"])
    other = adapters_here.load(folders["rslora"])
    path = folders["q_and_v"] / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 9}))
    with pytest.raises(ValueError, match=f"the adapter {folders['q_and_v']} has changed since it was loaded: load it"):
        adapters_here.weights(old)
    new = adapters_here.load(folders["q_and_v"])
    assert len({old, new, other}) == 3
    assert adapters_here.weights(new).identity == new


def test_a_forgotten_adapter_is_not_there(folders):
    adapters_here = store()
    identity = adapters_here.load(folders["q_and_v"])
    adapters_here.forget(identity)
    adapters_here.forget(identity)
    with pytest.raises(ValueError, match=f"no adapter is loaded that has the identity={identity}"):
        adapters_here.weights(identity)
    assert adapters_here.load(folders["q_and_v"]) == identity
    assert adapters_here.weights(identity).identity == identity


def test_a_refused_adapter_leaves_the_others(folders):
    adapters_here = store(max_cpu=1)
    identity = adapters_here.load(folders["q_and_v"])
    kept = adapters_here.weights(identity)
    with pytest.raises(ValueError, match="has rank 4, which is above --max-lora-rank 1"):
        AdapterStore(adapters.base_config(), max_rank=1, max_cpu=1).load(folders["q_and_v"])
    (folders["rslora"] / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"rslora/adapter_config\.json"):
        adapters_here.load(folders["rslora"])
    assert adapters_here.weights(identity) is kept


def test_many_threads_may_load_use_and_forget(folders):
    adapters_here = store(max_cpu=1)
    identities = {name: store().load(folder) for name, folder in folders.items()}

    def use(number: int) -> None:
        name = NAMES[number % len(NAMES)]
        assert adapters_here.load(folders[name]) == identities[name]
        if number % 5 == 4:
            adapters_here.forget(identities[NAMES[2]])
        if name != NAMES[2]:
            assert adapters_here.weights(identities[name]).identity == identities[name]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(60)))
