"""Checkpoints in buckets: the same weights as from a folder, the bytes that are read for them, and their faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.config import LlamaConfig
from model.inputs.paths import place
from model.inputs.remote import RemotePath
from model.loading import copies as local_copies
from model.loading.adapter import read_adapter
from model.loading.adapter_store import AdapterStore
from model.loading.remote_tensors import RemoteSlice, RemoteTensors
from model.loading.source import DEMO_FOLDER, Kind, adapter_place, resolve
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from scripts.convert_checkpoint import convert
from scripts.lab import plan
from tests.model import adapters, checkpoints, gguf_files
from tests.model.loaded import flat, load_orbax
from tests.model.loading.test_convert import convert as convert_in_a_process
from tests.model.loading.test_orbax_format import same
from tests.model.loading.test_packed_checkpoints import FORMATS
from tests.model.loading.test_packed_checkpoints import write as write_packed

HEAD_BYTES = 1 << 16  # of each file, read first


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch) -> Path:
    """The small files of buckets are copied to a folder of this test."""
    monkeypatch.setattr(local_copies, "COPIES", tmp_path / "copies")
    return tmp_path / "copies"


def put(folder: Path, url: str) -> RemotePath:
    """Copies the files of a folder to a store in memory."""
    fsspec.filesystem("memory").store.clear()
    there = place(url, "--model")
    assert isinstance(there, RemotePath)
    for path in sorted(folder.iterdir()):
        (there / path.name).write_bytes(path.read_bytes())
    return there


@pytest.mark.clients
@pytest.mark.parametrize("num_chips", [1, 2, 4])  # for four, KV heads are repeated
def test_the_demo_from_a_bucket_is_the_demo_and_each_byte_is_read_once(store, num_chips):
    url = store.upload(DEMO_FOLDER, "models", "demo")
    found, local = resolve(url), resolve("demo")
    assert (found.kind, str(found.weights), found.config) == (Kind.FOLDER, url, local.config)
    options = {"dtype": "float32", "mesh": make_mesh(num_chips) if num_chips > 1 else None}
    stored = find_weights(found.weights, found.config)
    store.bytes_read.clear()
    same(stored.load(**options), load_hf(DEMO_FOLDER, local.config, **options))
    size = (DEMO_FOLDER / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((DEMO_FOLDER / "model.safetensors").read_bytes()[:8], "little")
    assert dict(store.bytes_read) == {"models/demo/model.safetensors": size - header + HEAD_BYTES}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize(("variant", "num_chips"), [("gqa2", 4), ("bf16", 2)])
def test_every_form_of_a_folder_is_read_from_a_store(tmp_path, variant, num_files, num_chips):
    folder = checkpoints.write(tmp_path / "hf", variant, num_files=num_files)
    url = put(folder, "memory://bucket/models/m")
    found = resolve(str(url))
    options = {"dtype": "float32", "mesh": make_mesh(num_chips)}
    same(find_weights(url, found.config).load(**options), load_hf(folder, found.config, **options))


def test_four_bit_kernels_are_kept_from_a_store_and_each_tensor_is_read_once(tmp_path, monkeypatch):
    folder = tmp_path / "hf"
    write_packed(folder, FORMATS["awq"], group=16)
    url = put(folder, "memory://bucket/m")
    config = LlamaConfig.from_file(folder)
    options = {"dtype": "float32", "mesh": make_mesh(2)}
    local, remote = find_weights(folder, config), find_weights(url, config)
    assert local.four_bit is not None and remote.four_bit == local.four_bit
    read: list[tuple[int, int]] = []
    whole = RemotePath.read_range
    monkeypatch.setattr(RemotePath, "read_range", lambda self, a, b: (read.append((a, b)), whole(self, a, b))[1])
    same(remote.load(**options, quantization=remote.four_bit), local.load(**options, quantization=local.four_bit))
    of_tensors = [place for place in read if place[0] > 0]
    assert len(of_tensors) == len(set(of_tensors))


def test_a_plan_reads_the_heads_of_files_only(tmp_path, monkeypatch, capsys):
    shutil.copytree(DEMO_FOLDER, tmp_path / "demo", ignore=shutil.ignore_patterns("draft", "adapters"))
    url = put(tmp_path / "demo", "memory://bucket/m")
    read: list[int] = []
    whole = RemoteSlice._rows
    monkeypatch.setattr(RemoteSlice, "_rows", lambda self, a, b: (read.append(b - a), whole(self, a, b))[1])
    assert plan.main(["--model", str(url), "--target", "v6e:1x1", "--no-compile"]) == 0
    assert "weights" in capsys.readouterr().out and not read


def test_a_chips_rows_are_all_that_is_read_of_a_tensor(tmp_path, monkeypatch):
    tensor = np.arange(6 * 5, dtype=np.float32).reshape(6, 5)
    save_file(
        {"first": np.zeros(3, np.int8), "t": tensor, "scalar": np.array(7, np.float32)}, tmp_path / "f.safetensors"
    )
    file = put(tmp_path, "memory://bucket/m") / "f.safetensors"
    slices = RemoteTensors(file).slices()
    assert {key: (part.get_shape(), part.get_dtype()) for key, part in slices.items()} == {
        "first": ([3], "I8"), "t": ([6, 5], "F32"), "scalar": ([], "F32"),
    }  # fmt: skip
    read: list[int] = []
    whole = RemotePath.read_range
    monkeypatch.setattr(RemotePath, "read_range", lambda self, a, b: (read.append(b - a), whole(self, a, b))[1])
    part = slices["t"].reader(slice(2, 4))
    assert read == [2 * 5 * 4]
    np.testing.assert_array_equal(part((slice(3, 4), slice(1, 3))), tensor[3:4, 1:3])
    np.testing.assert_array_equal(slices["t"][slice(1, 3), slice(None, None, 2)], tensor[1:3, ::2])
    np.testing.assert_array_equal(slices["t"][...], tensor)
    assert slices["scalar"][...] == 7
    assert read == [40, 40, 120, 4]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"1")


def _pointer(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _longer,
        _pointer,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:20]),
        lambda file: file.write_bytes(b"no tensors here, but a text"),
        lambda file: file.write_bytes((9).to_bytes(8, "little") + b"[1, 2, 3]"),
        lambda file: file.unlink(),
        lambda file: save_file({"x": np.zeros(3, np.float32)}, file),
        lambda file: save_file({k: v for k, v in load_file(file).items() if "norm" not in k}, file),
    ],
)
def test_a_faulty_file_is_refused_as_one_of_a_folder_is(tmp_path, damage: Callable[[Path], None]):
    folder = checkpoints.write(tmp_path / "hf", "gqa2")
    config = LlamaConfig.from_file(folder)
    damage(folder / "model.safetensors")
    url = put(folder, "memory://bucket/m")
    with pytest.raises(ValueError) as local:
        find_weights(folder, config)
    with pytest.raises(ValueError) as remote:
        find_weights(url, config)
    library, words = "Error while deserializing header", str(local.value).replace(str(folder), str(url))
    assert str(remote.value) == words or (library in words and str(remote.value).startswith(words.split(library)[0]))


@pytest.mark.parametrize("offsets", [[0, 11], [1, 13], [0, 13], [-1, 11], ["0", 12]])
def test_a_header_whose_places_do_not_fit_is_refused(offsets):
    file = RemotePath("memory", "bucket/m.safetensors")
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": offsets}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(ValueError, match=r"memory://bucket/m\.safetensors (has|is not a safetensors file)"):
        RemoteTensors(file)


def test_weights_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    folder = checkpoints.write(tmp_path / "hf", "gqa2")
    url = put(folder, "memory://bucket/m")
    opened = RemoteTensors.slices

    def changed(self: RemoteTensors) -> dict:
        (url / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        return opened(self)

    monkeypatch.setattr(RemoteTensors, "slices", changed)
    with pytest.raises(ValueError, match="changed while it was read: start again"):
        load_hf(url, LlamaConfig.from_file(folder), dtype="float32")


def test_what_is_no_model_is_refused_by_its_url(tmp_path):
    put(checkpoints.write(tmp_path / "hf", "gqa2"), "memory://bucket/m")
    for url, words in {
        "memory://bucket/none": "there is no folder and no GGUF file memory://bucket/none",
        "memory://bucket/none.gguf": "there is no file memory://bucket/none.gguf",
        "memory://bucket": "the folder memory://bucket has no config.json",
        "memory://other/m": "memory://other/m.*: there is no bucket other",
    }.items():
        with pytest.raises(ValueError, match=words):
            resolve(url)


@pytest.mark.parametrize("splitting", [{}, {"split_max_tensors": 8}])
def test_a_gguf_file_is_fetched_once(tmp_path, copies, splitting):
    config = LlamaConfig.from_file(checkpoints.write(tmp_path / "hf", "gqa2"))
    (tmp_path / "gguf").mkdir()
    gguf_files.write(tmp_path / "gguf" / "m.gguf", config, checkpoints.tensors("gqa2"), **splitting)
    first = min((tmp_path / "gguf").iterdir())
    assert ("-00001-of-" in first.name) == bool(splitting)
    url = put(tmp_path / "gguf", "memory://bucket/m") / first.name
    found = resolve(str(url))
    assert found.kind is Kind.GGUF and found.path is not None and copies in found.path.parents
    assert resolve(str(url)).path == found.path == found.weights
    same(
        load_hf(found.path, found.config, dtype="float32"),
        load_hf(first, found.config, dtype="float32"),
    )


@pytest.mark.clients
def test_a_conversion_goes_from_bucket_to_bucket_and_each_chip_reads_its_parts(store):
    source = resolve(store.upload(DEMO_FOLDER, "models", "demo"))
    out = place("gs://models/converted", "folder")
    converted = convert_in_a_process(source.name, out)
    assert converted.returncode == 0, converted.stderr
    assert "converted/config.json" in store.names("models") and "converted/tokenizer.json" in store.names("models")
    found = resolve(str(out))
    assert found.eos_token_ids == source.eos_token_ids
    stored = find_weights(out, found.config)
    assert stored.is_converted
    store.bytes_read.clear()
    mesh = make_mesh(2)
    same(stored.load(dtype="bfloat16", mesh=mesh), load_hf(DEMO_FOLDER, found.config, dtype="bfloat16", mesh=mesh))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(flat(stored.load(dtype="bfloat16", mesh=mesh))))
    read = sum(number for name, number in store.bytes_read.items() if "/arrays/" in name) / 2  # it was loaded twice
    assert weights <= read < 1.02 * weights
    with pytest.raises(ValueError, match="gs://models/converted is not an empty folder"):
        convert(source, DEMO_FOLDER, out, dtype=None)
    store.refuse = lambda method, bucket, name: (403, "no access") if "/arrays/" in name else None
    with pytest.raises(ValueError, match=r"gs://models/converted/orbax: .* allow this machine to read it .*no access"):
        load_orbax("gs://models/converted/orbax", found.config, dtype="bfloat16", mesh=mesh)


def test_a_store_that_tensorstore_does_not_know_holds_no_conversion(tmp_path):
    config = LlamaConfig.from_file(checkpoints.write(tmp_path / "hf", "gqa2"))
    url = put(tmp_path / "hf", "memory://bucket/m")
    found = resolve(str(url))
    with pytest.raises(ValueError, match=r"memory://bucket/out/orbax: .*are on a disk or on gs:// and s3://"):
        convert(found, url, place("memory://bucket/out", "folder"), dtype=None)
    assert config == found.config


@pytest.mark.parametrize("name", ["rslora", "torch_file"])
def test_an_adapter_is_read_from_a_store(name, tmp_path):
    config = adapters.base_config()
    url = put(adapters.folder(name), "memory://bucket/adapter")
    (url / "optimizer.pt").write_bytes(b"of a trainer")
    store = AdapterStore(config, max_rank=4, max_cpu=1)
    identity = store.load(adapter_place(str(url)))
    assert identity == read_adapter(adapters.folder(name), config, max_rank=4).identity
    assert not any(tmp_path.rglob("optimizer.pt"))
    other = store.load(adapters.folder("pattern"))
    assert store.weights(identity).identity == identity != other
    store.weights(other)
    raw = json.loads((url / "adapter_config.json").read_text())
    (url / "adapter_config.json").write_text(json.dumps(raw | {"lora_alpha": 1}))
    with pytest.raises(ValueError, match="memory://bucket/adapter has changed since it was loaded"):
        store.weights(identity)


def test_a_gguf_adapter_is_read_from_a_store(tmp_path):
    config = adapters.base_config()
    gguf_files.write_adapter(tmp_path / "a.gguf", config, adapters.read(adapters.folder("q_and_v"))[1], alpha=8)
    fsspec.filesystem("memory").store.clear()
    url = place("memory://bucket/a.gguf", "--lora-modules")
    url.copy_from(tmp_path / "a.gguf")
    found = read_adapter(adapter_place(str(url)), config, max_rank=4)
    assert found.identity == read_adapter(adapters.folder("q_and_v"), config, max_rank=4).identity
    with pytest.raises(ValueError, match=r"no adapter 'memory://bucket/b\.gguf'"):
        adapter_place("memory://bucket/b.gguf")
