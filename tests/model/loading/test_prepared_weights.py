"""Prepared weights in a file: mapped, they are those that were kept, and no fault of the file or the disk is an end."""

from __future__ import annotations

import logging
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.loading.prepared_weights import SUFFIX, keep, mapped
from model.loading.weights import random_weights
from model.network.llama import Llama
from model.network.packed import pack_for_cpu
from model.network.sharding import abstract_model
from model.quantization.forms import EightBit
from tests.model.driver import TINY

CONFIG = replace(TINY, vocab_size=192, hidden_size=64, intermediate_size=96)
FORMS = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "quantization": EightBit.INT8}]


def made(seed: int = 0, **form: object) -> Llama:
    return pack_for_cpu(random_weights(CONFIG, seed=seed, **form))


def planned(**form: object) -> Llama:
    return pack_for_cpu(abstract_model(CONFIG, **form))


def leaves(model: Llama) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


def are_equal(one: Llama, other: Llama) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(x.dtype == y.dtype and x.sharding == y.sharding and np.array_equal(x, y) for x, y in pairs)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "weights" / f"model{SUFFIX}"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mapped_weights_are_those_that_were_kept_and_no_copies(file, form):
    model = made(**form)
    assert mapped(planned(**form), file) is None
    assert keep(model, file)
    found = mapped(planned(**form), file)
    assert found is not None and are_equal(found, model) and not are_equal(found, made(seed=1, **form))
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    (first, end), *others = ([int(address, 16) for address in addresses.split("-")] for addresses in ranges)
    assert not others and all(first <= array.unsafe_buffer_pointer() < end for array in leaves(found))
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_program_that_takes_them_over_does_not_write_to_the_file(file):
    keep(made(**FORMS[0]), file)
    before = file.read_bytes()
    found = mapped(planned(**FORMS[0]), file)
    assert found is not None
    changed = jax.jit(lambda arrays: [jnp.zeros_like(x) + x[:1] for x in arrays], donate_argnums=0)(leaves(found))
    jax.block_until_ready(changed)
    assert file.read_bytes() == before


def test_the_file_may_go_while_it_is_in_use(file):
    model = made(**FORMS[0])
    keep(model, file)
    found = mapped(planned(**FORMS[0]), file)
    keep(made(seed=1, **FORMS[0]), file)
    file.unlink()
    assert found is not None and are_equal(found, model)


def test_a_file_of_another_size_is_prepared_again(file, caplog):
    keep(made(**FORMS[0]), file)
    os.truncate(file, file.stat().st_size - 1)
    assert mapped(planned(**FORMS[0]), file) is None
    assert f"{file} has" in caplog.text and "prepared again" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_full_disk_is_left_alone(file, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100_000))
    assert not keep(made(**FORMS[0]), file)
    assert not any(file.parent.iterdir())


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert not keep(made(**FORMS[0]), tmp_path / "file" / f"model{SUFFIX}")
    assert "prepared weights cannot be kept" in caplog.text


def test_what_was_not_used_for_long_is_deleted(file):
    model = made(**FORMS[0])
    files = [file.with_name(f"{number}{SUFFIX}") for number in range(5)]
    for path in files:
        keep(model, path)
    assert all(path.exists() for path in files), "all are in use"
    for age, path in enumerate(files[1:4]):
        os.utime(path, times=(0, age))
    mapped(planned(**FORMS[0]), files[1])  # in use again
    keep(model, file)
    assert {path for path in files if path.exists()} == {files[0], files[1], files[4]}
