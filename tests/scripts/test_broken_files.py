"""Files of a checkpoint that are damaged, or are none: each is read or refused with its name, and nothing waits."""

from __future__ import annotations

import base64
import json
import os
import pickle
import pickletools
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from model.inputs.words import one_line
from model.loading.eagle_head import HeadFiles
from model.loading.orbax_format import save_orbax
from model.loading.source import resolve
from model.loading.stored_weights import find_weights
from model.loading.torch_file import read_torch_file
from model.loading.weights import load_hf
from scripts.building.weights import find_end_tokens
from scripts.flags.config_file import with_config
from server.settings import GenerationDefaults
from server.text.tokenizer import ByteLevelTokenizer
from tests.examples import examples
from tests.model import checkpoints, eagle_heads, gguf_files
from tests.model.gguf_files import Type
from tests.model.goldens import make_eagle
from tests.model.loaded import load_orbax
from tests.server.support.tokenizers import VOCAB_SIZE, write_folder

WAIT_S = 60  # until a reader of a pipe counts as hanging
REFUSALS = (ValueError, OSError)


def refusal(read: Callable[[], object]) -> str | None:
    """The line in which it is refused; None if it is read. Any other error fails the test, and so does waiting."""
    done: Future[str | None] = Future()

    def run() -> None:
        try:
            read()
            done.set_result(None)
        except REFUSALS as error:
            done.set_result(one_line(str(error)))
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result(WAIT_S)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint in every form, whose files are all read."""
    root = tmp_path_factory.mktemp("whole")
    folder = checkpoints.write(root / "hf", "gqa2")
    config = LlamaConfig.from_file(folder)
    write_folder(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|begin_of_text|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoints.write(root / "parts", "gqa2", num_files=2)
    (root / "metas").mkdir()
    ranks = [base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256)]
    (root / "metas" / "tokenizer.model").write_bytes(b"".join(ranks))
    sizes = {"vocab_size": VOCAB_SIZE}
    tensors = {
        key: np.resize(value, (VOCAB_SIZE, value.shape[1])) if value.shape[0] == config.vocab_size else value
        for key, value in checkpoints.tensors("gqa2").items()
    }
    (folder / "config.json").write_text(json.dumps(config.to_hf() | sizes))
    checkpoints.write_tensors(folder, tensors)
    config = LlamaConfig.from_file(folder)
    (root / "gguf").mkdir()
    plain = {"pad_token": "<|python_tag|>"} | json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(plain))
    gguf_files.write(root / "gguf" / "m.gguf", config, tensors, Type.Q4_0, tokenizer=folder)
    model = load_hf(folder, config, dtype=jnp.float32)
    save_orbax(model, root / "orbax", config, np.ones((config.num_layers, 2, config.num_kv_heads), np.float32))
    (root / "eagle").mkdir()
    (root / "eagle" / "config.json").write_text(json.dumps(make_eagle.config("eagle3")))
    shutil.copy(make_eagle.FOLDER / "eagle3.bin", root / "eagle" / "pytorch_model.bin")
    (root / "yaml").mkdir()
    (root / "yaml" / "serve.yaml").write_text("model: demo\nmax-model-len: 512\napi-key: [a, b]\n")
    return root


def read_model(folder: Path) -> None:
    source = resolve(str(folder))
    find_end_tokens(source)
    stored = find_weights(source.path, source.config)
    for form in {stored.quantization, *filter(None, (stored.four_bit, stored.exact_form))}:
        stored.load(dtype=jnp.float32, quantization=form)


def read_text(folder: Path) -> None:
    ByteLevelTokenizer.from_folder(folder, vocab_size=VOCAB_SIZE)


def read_head(folder: Path) -> None:
    config = EagleConfig.from_file(folder, EagleForm.EAGLE3, eagle_heads.MODEL)
    HeadFiles(folder, config).tokens()


def read_orbax(folder: Path) -> None:
    stored = find_weights(folder.parent, LlamaConfig.from_file(folder.parent / "hf"), "orbax")
    stored.kv_ranges()
    load_orbax(folder, stored.config, dtype=jnp.float32)


READERS: dict[str, Callable[[Path], object]] = {
    "hf": read_model,
    "parts": read_model,
    "metas": read_text,
    "gguf": lambda folder: read_model(folder / "m.gguf"),
    "orbax": read_orbax,
    "eagle": read_head,
    "yaml": lambda folder: with_config(["--config", str(folder / "serve.yaml")]),
}
FILES = [
    ("hf", "config.json"), ("hf", "generation_config.json"), ("hf", "model.safetensors"), ("hf", "tokenizer.json"),
    ("parts", "model.safetensors.index.json"), ("parts", "model-00001-of-00002.safetensors"),
    ("gguf", "m.gguf"), ("eagle", "config.json"), ("eagle", "pytorch_model.bin"), ("yaml", "serve.yaml"),
    ("orbax", "stored.json"), ("orbax", "arrays/manifest.ocdbt"),
    ("metas", "tokenizer.model"),
]  # fmt: skip


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.mark.parametrize("format", READERS)
def test_whole_files_are_read(whole, format):
    READERS[format](whole / format)
    if format == "hf":
        read_text(whole / format)
        GenerationDefaults.from_folder(whole / format)


def replaced(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                os.chdir(path.parent)  # a socket's path is short
                server.bind(path.name)


@pytest.mark.parametrize(
    ("format", "name", "kind"),
    [*((*file, "pipe") for file in FILES), *(("hf", "config.json", kind) for kind in ("folder", "device", "socket"))],
)
def test_what_is_no_file_is_refused_at_once(copy, monkeypatch, format, name, kind):
    monkeypatch.chdir(copy)
    path = copy / format / name
    replaced(path, kind)
    said = refusal(lambda: READERS[format](copy / format))
    named = path if path.parent == copy / format else copy / format  # of the arrays' files
    assert said is not None and str(named) in said


TEXTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", TEXTS)
def test_no_file_of_a_tokenizer_is_skipped(copy, name, kind):
    replaced(copy / "hf" / name, kind)
    said = refusal(lambda: read_text(copy / "hf"))
    assert said == f"{copy / 'hf' / name} is not a file"


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """The bytes with some changed, cut off, exchanged, left out or put in. Most changes are at the beginning and the
    end, where most formats have their tables."""
    place = st.one_of(*(st.integers(0, min(len(raw), most)) for most in (64, 2000, len(raw))))
    place = place | place.map(lambda i: len(raw) - i)
    fill = st.sampled_from([b"\xff", b"\0", b"9"])
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at, other = sorted((draw(place), draw(place)))
        size = draw(st.sampled_from([1, 1, 2, 4, 8, 64]))
        new = draw(st.binary(min_size=size, max_size=size)) if draw(st.booleans()) else draw(fill) * size
        match draw(st.sampled_from(["change", "change", "change", "cut", "drop", "insert", "exchange"])):
            case "change":
                changed[at : at + size] = new
            case "cut":
                del changed[other:]
            case "drop":
                del changed[at : at + size]
            case "insert":
                changed[at:at] = new
            case "exchange":
                one, two = changed[at : at + size], changed[other : other + size]
                changed[at : at + size], changed[other : other + size] = two, one
    return bytes(changed)


def fuzz(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples(number), suppress_health_check=health)


@pytest.fixture(scope="module")
def spoiled(whole, tmp_path_factory) -> Path:
    """A copy for files that are damaged again and again."""
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("spoiled") / "copy"))


@pytest.mark.parametrize(("format", "name"), [*FILES, ("orbax", "a part of the arrays")])
@fuzz(25)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(whole, spoiled, format, name, data):
    if format == "orbax" and " " in name:
        parts = sorted(path for path in (whole / "orbax" / "arrays").rglob("*") if path.is_file())
        name = str(data.draw(st.sampled_from(parts)).relative_to(whole / "orbax"))
    raw = (whole / format / name).read_bytes()
    path = spoiled / format / name
    path.write_bytes(data.draw(damaged(raw)))
    said = refusal(lambda: READERS[format](spoiled / format))
    path.write_bytes(raw)
    assert said is None or str(spoiled) in said


@fuzz(150)
@given(data=st.data())
def test_damaged_pickles_in_a_whole_archive_are_read_or_refused(whole, tmp_path, data):
    with zipfile.ZipFile(whole / "eagle" / "pytorch_model.bin") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in entries if name.endswith("data.pkl"))
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in (entries | {name: data.draw(damaged(entries[name]))}).items():
            archive.writestr(entry, content)
    said = refusal(lambda: read_torch_file(path))
    assert said is None or str(path) in said


def torch_archive(path: Path, pickled: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled, compress_type=method)
        archive.writestr("archive/data/0", bytes(64))
    return path


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The pickle of a state dict with one tensor, as torch.save writes it."""

    def pushed(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + pushed("storage") + b"ctorch\nFloatStorage\n" + pushed("0") + pushed("cpu") + pushed(16) + b"tQ"
    arguments = b"(" + storage + pushed(0) + pushed(shape) + pushed(strides) + pushed(False) + b"NtR"
    return b"\x80\x02}" + pushed("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"s."


def test_a_pickle_of_this_test_is_a_tensor(tmp_path):
    path = torch_archive(tmp_path / "x.bin", tensor((2, 8), (8, 1)))
    assert read_torch_file(path)["w"].get_shape() == [2, 8]


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (tensor((2, 8), (2**70, 1)), "a tensor of shape (2, 8) and strides (1180591620717411303424, 1) does not fit"),
        (tensor((0, 2**70), (1, 1)), ""),
        (tensor((1,) * 70, (1,) * 70), ""),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "its pickle has no room for memo 4294967295"),
        (b"\x80\x02Np999999999999\n.", "its pickle has no room for memo 999999999999"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", ""),
        (tensor((1,), (1,))[:-2] + b"}" + pickle.dumps("values", 2)[2:-1] + b"K\x05sbs.", "it changes a tensor"),
        (b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".", "it holds other things than tensors by name"),
        (pickletools.optimize(pickle.dumps({"a": 10**6000}, 2)), "it holds other things than tensors by name"),
        (b"N" * (2 << 20), "its pickle has more than 1048576 bytes"),
    ],
)
def test_hostile_pickles_are_refused_in_words(tmp_path, pickled, words):
    path = torch_archive(tmp_path / "x.bin", pickled)
    said = refusal(lambda: read_torch_file(path))
    assert said is not None and said.startswith(f"{path} holds no state dict: {words}")


@pytest.mark.parametrize("fault", ["checksum", "encrypted", "method", "deflate"])
def test_archives_that_cannot_be_unpacked_are_refused_in_words(tmp_path, fault):
    method = zipfile.ZIP_DEFLATED if fault == "deflate" else zipfile.ZIP_STORED
    path = torch_archive(tmp_path / "x.bin", tensor((2, 8), (8, 1)), method)
    raw = bytearray(path.read_bytes())
    local, central = raw.index(b"PK\3\4"), raw.index(b"PK\1\2")
    match fault:
        case "checksum" | "deflate":
            at = local + 30 + len("archive/data.pkl")
            raw[at : at + 8] = b"\xff" * 8
        case "encrypted":
            raw[local + 6] |= 1
            raw[central + 8] |= 1
        case "method":
            raw[local + 8] = raw[central + 10] = 99
    path.write_bytes(raw)
    said = refusal(lambda: read_torch_file(path))
    assert said is not None and said.startswith(f"{path} holds no state dict: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 50_000, "is nested too deeply"),
        ("a: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("a: 2020-99-99", "is not YAML: month must be in 1..12"),
        ("a: !!bool x", "is not YAML: 'x'"),
        ("a: !!timestamp x", "is not YAML: "),
        ("a: !!python/object:os.system x", "is not YAML: could not determine a constructor"),
        ("a: [[1], [2]]", "a must be a value or a list of them, not [[1], [2]]"),
        ("a: &a [*a]", "a must be a value or a list of them, not "),
        ("x: &x [1, 1]\ny: &y [*x, *x]\nz: [*y, *y]", "y must be a value or a list of them"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_refused_in_words(tmp_path, text, words):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    said = refusal(lambda: with_config(["--config", str(path)]))
    assert said is not None and said.startswith((f"--config {path} {words}", f"--config {path}: {words}"))


def test_an_adapter_is_named_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/no/model", "r": 16}')
    with pytest.raises(ValueError, match=f"{tmp_path} is an adapter of '/no/model': no model .* --models NAME="):
        resolve(str(tmp_path))
    checkpoints.write(tmp_path, "gqa2")
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    wanted = f"{tmp_path} is an adapter of the model '/no/model' and no model: serve its model with --enable-lora "
    with pytest.raises(ValueError, match=f"{wanted}--lora-modules NAME=FOLDER, or merge the two "):
        find_weights(tmp_path, LlamaConfig.from_file(tmp_path))
    shutil.copy(tmp_path / "adapter_model.safetensors", tmp_path / "model.safetensors")
    find_weights(tmp_path, resolve(str(tmp_path)).config)  # a model that its adapter is merged into
