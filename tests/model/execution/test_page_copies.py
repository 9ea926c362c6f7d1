"""Pages that leave the device and come back, to the same pages or to others, hold what they held, bit for bit."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.step import MAX_PAGE_COPIES
from model.eagle_config import EagleForm
from model.execution.memory_plan import MemoryNeeds, RunnerConfig, memory_needs
from model.execution.prompt_lookup import PromptLookup
from model.execution.runner import ModelRunner
from model.loading.weights import random_weights
from model.network.sharding import make_mesh
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.lab.accounts.process import printed_by
from scripts.lab.accounts.specs import KV_DTYPES
from tests.model.collectives import collectives
from tests.model.driver import TINY, int8_scales
from tests.model.execution.drafting import head

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64, "num_pages": 23}
LOOKUP = PromptLookup(min_tokens=1, max_tokens=3)
MOVING = {"moves_pages": True}


def make(
    *,
    backend: Backend = Backend.REFERENCE,
    kv_dtype: Any = jnp.float32,
    dtype: Any = jnp.float32,
    drafts: str | None = None,
    num_shards: int = 1,
    **limits: Any,
) -> ModelRunner:
    """Its weights are random; it has compiled nothing."""
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    is_chip = backend.is_interpreted
    config = replace(TINY, num_heads=8, num_kv_heads=4, vocab_size=200, head_dim=64 if is_chip else 16)
    model = random_weights(config, dtype=dtype, mesh=mesh)

    def attention(kv_dtype: Any) -> PagedAttention:
        spec = AttentionSpec(
            num_query_heads=config.num_heads, num_kv_heads=model.config.num_kv_heads, head_dim=config.head_dim,
            page_size=64 if "gpu" in backend else 32 if is_chip else 16, dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
        return PagedAttention(spec, backend, mesh)

    draft: Any = None
    if drafts == "model":
        draft = random_weights(replace(config, num_layers=1), dtype=dtype, mesh=mesh), attention(dtype)
    elif drafts in set(EagleForm):
        draft = head(drafts, mesh=mesh), attention(dtype)
    scales = int8_scales(model) if kv_dtype != dtype else None
    settings = LIMITS | MOVING | {"lookup": LOOKUP if drafts == "lookup" else None, "max_draft_rows": 4} | limits
    made = ModelRunner(model, attention(kv_dtype), RunnerConfig(**settings), scales, draft=draft)
    made.made_from = model, draft
    return made


def warm_copies(runner: ModelRunner) -> ModelRunner:
    """Without steps, which take long to compile."""
    updates, programs = runner.described.updates(), runner.programs
    copies = runner.described.page_copies
    for size in copies.sizes:
        programs.read_pages[size] = updates[copies.name("read", size)].lower().compile()
        programs.write_pages[size] = updates[copies.name("write", size)].lower().compile()
    return runner


def random_pages(runner: ModelRunner, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 256, (count, runner.capacity().page_bytes), dtype=np.uint8))


def bytes_of_copy(runner: ModelRunner, size: int) -> int:
    """On one device."""
    described = runner.described
    _, form, _ = described.updates()[described.page_copies.name("write", size)].arguments
    return sum(math.prod(like.sharding.shard_shape(like.shape)) * like.dtype.itemsize for like in form)


def read(runner: ModelRunner, pages: list[int]) -> list[np.ndarray]:
    found = [np.zeros(runner.capacity().page_bytes, np.uint8) for _ in pages]
    runner.read_pages(pages).copy_to(found)
    return found


def write(runner: ModelRunner, content: list[np.ndarray], pages: list[int]) -> None:
    runner.write_pages(runner.stage_pages(content), pages)


def bits_of_state(runner: ModelRunner) -> Iterator[tuple[np.ndarray, int | None]]:
    """Every array of the state as bytes, and its page axis."""
    kv_axis = runner.described.attention.page_axis
    pages = runner.capacity().num_pages + 1
    for leaf in jax.tree.leaves(runner.state):
        is_kv, first = leaf.ndim > 3 and leaf.shape[kv_axis] == pages, leaf.shape[0] == pages
        axis = kv_axis if is_kv else 0 if first else None
        values = np.array(leaf)
        yield values[..., None].view(np.uint8), axis


def parts_of(runner: ModelRunner, page: int) -> list[np.ndarray]:
    """A page's bits in each array."""
    return [np.take(values, page, axis) for values, axis in bits_of_state(runner) if axis is not None]


FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"kv_dtype": jnp.int8},
    "fp8": {"kv_dtype": jnp.float8_e4m3fn},
    "lookup": {"drafts": "lookup"},
    "bfloat16, draft model": {"dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16, "drafts": "model"},
    "EAGLE-3": {"drafts": "eagle3", "kv_dtype": jnp.int8},
    "C": {"backend": Backend.CPU},
    "GPU": {"backend": Backend.GPU_INTERPRET, "dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16},
    "GPU, fp8": {"backend": Backend.GPU_MMA_INTERPRET, "dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn},
    "TPU, int8": {"backend": Backend.TPU_INTERPRET, "kv_dtype": jnp.int8, "drafts": "lookup"},
    "two chips": {"num_shards": 2, "drafts": "model"},
    "four chips": {"num_shards": 4, "kv_dtype": jnp.float8_e4m3fn},
    "two TPUs": {"num_shards": 2, "backend": Backend.TPU_INTERPRET},
}


@pytest.fixture(scope="module", params=FORMS)
def runner(request) -> ModelRunner:
    return warm_copies(make(**FORMS[request.param]))


def test_pages_come_back_to_others_bit_for_bit(runner) -> None:
    content = random_pages(runner, 5)
    write(runner, content, [9, 2, 23, 1, 14])
    held = [parts_of(runner, page) for page in (9, 2, 23, 1, 14)]
    assert sum(part.size for part in held[0]) == runner.capacity().page_bytes
    assert all(len({values.tobytes() for values in parts}) == 5 for parts in zip(*held, strict=True)), "of each array"
    found = read(runner, [9, 2, 23, 1, 14])
    for own, expected in zip(found, content, strict=True):
        np.testing.assert_array_equal(own, expected)
    write(runner, found, [3, 4, 5, 6, 7])
    for page, parts in zip((3, 4, 5, 6, 7), held, strict=True):
        for own, expected in zip(parts_of(runner, page), parts, strict=True):
            np.testing.assert_array_equal(own, expected)


def test_what_is_not_named_stays(runner) -> None:
    write(runner, random_pages(runner, 5, seed=1), [8, 9, 10, 11, 12])
    before = list(bits_of_state(runner))
    read(runner, [8, 12])
    staged = runner.stage_pages(random_pages(runner, 3, seed=2))
    runner.write_pages(staged, [20, 10])  # one of the three is not wanted any more
    for (old, axis), (new, _) in zip(before, bits_of_state(runner), strict=True):
        if axis is not None:
            assert (np.take(old, 20, axis) != np.take(new, 20, axis)).any()
            old, new = (np.delete(values, [10, 20], axis) for values in (old, new))
        np.testing.assert_array_equal(new, old)


def test_the_programs_work_in_place_and_exchange_nothing(runner) -> None:
    copies, programs = runner.described.page_copies, runner.programs
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(runner.state) for shard in leaf.addressable_shards[:1])
    for size in copies.sizes:
        copy = bytes_of_copy(runner, size)
        # XLA has a CPU write to floats of 8 bits in a wider copy, as in steps. Only GPUs are given such pages.
        has_copies = runner.described.attention.spec.kv_dtype == jnp.float8_e4m3fn
        for program, aliased in ((programs.read_pages[size], 0), (programs.write_pages[size], held)):
            analysis = program.memory_analysis()
            assert analysis.alias_size_in_bytes == aliased
            assert has_copies or analysis.temp_size_in_bytes < copy + 1024  # nothing of the size of the state's pages
            assert not collectives(program.as_text())


def test_the_plan_has_room_for_copies_on_their_way(runner) -> None:
    described = runner.described
    size = described.page_copies.most
    held = bytes_of_copy(runner, size)

    def needs(**limits: bool) -> MemoryNeeds:
        return memory_needs(
            runner.made_from[0], described.attention, replace(described.config, **limits), runner.made_from[1]
        )

    assert needs().page * size == held
    assert needs().state - needs(moves_pages=False).state == 2 * MAX_PAGE_COPIES * held


@pytest.mark.targets
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kv_dtype", "drafts"),
    [
        ("v6e:1x1", "auto", ("eagle",)),
        ("v6e:2x2", "int8", ("eagle",)),
        ("h200", "auto", ()),
        ("4xh200", "fp8", ("eagle",)),
    ],
)
def test_chips_keep_no_second_copy(target, kv_dtype, drafts) -> None:
    needed = "libtpu" if ":" in target else "jax_cuda13_plugin"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: scripts/test --all installs it")
    results = printed_by("tests.model.execution.compile_page_copies", target, KV_DTYPES[kv_dtype], *drafts)
    print(target, *results, sep="\n")  # what `pytest -rP` shows
    assert [result["kind"] for result in results] == ["read", "read", "write", "write"]
    for result in results:
        state, copy = result["state_bytes"], result["copy_bytes"]
        reads = result["kind"] == "read"
        assert result["exchanges"] == 0, result
        assert result["temp_bytes"] <= copy, result
        # The chips' tiles of small arrays are padded.
        assert 0 <= result["argument_bytes"] - state - (0 if reads else copy) <= 1 << 16, result
        assert 0 <= result["output_bytes"] - (copy if reads else state) <= 1 << 16, result
        assert 0 <= result["alias_bytes"] - (0 if reads else state) <= 1 << 16, result
