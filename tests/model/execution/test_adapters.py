"""LoRA adapters in a step: each row's tokens are those of the model into which its adapter is merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batcher.request import SamplingParams
from batcher.slots import SlotLayout
from batcher.step import AdapterWrite, Bucket, PackedLayout, StepOutput, Variant, WeightsKind
from model.config import LlamaConfig
from model.execution.memory_plan import RunnerConfig, memory_needs
from model.execution.prompt_lookup import PromptLookup
from model.execution.runner import ModelRunner
from model.execution.step_programs import WRITE_ADAPTER
from model.loading.adapter_store import AdapterStore
from model.loading.weights import load_hf
from model.network.lora import LoraWeights
from model.network.packed import pack_for_cpu
from model.network.sharding import abstract_model, make_mesh
from model.quantization.forms import form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import Backend
from tests.model import adapters as goldens
from tests.model import checkpoints
from tests.model.adapters import merged, random_weights
from tests.model.collectives import collectives
from tests.model.dense_attention import dense_logits
from tests.model.driver import Row, paged_attention, run
from tests.model.driver import pack as packed_step

pytestmark = pytest.mark.slow

VARIANT = "gqa2"
MAX_LORAS, RANK = 3, 8
PROMPT = Bucket(24, 4, Variant.SAMPLE, has_adapters=True)
DECODE = Bucket(4, 4, Variant.GREEDY, has_adapters=True)
DRAFTS = Bucket(12, 4, Variant.GREEDY, num_drafts=2, has_adapters=True)
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_pages": 40}
WITH_LOGPROBS = SamplingParams(max_tokens=64, temperature=0, logprobs=1)

Make = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("base"), VARIANT)


@pytest.fixture(scope="module")
def config(folder: Path) -> LlamaConfig:
    return LlamaConfig.from_file(folder)


@pytest.fixture(scope="module")
def adapters(config: LlamaConfig) -> dict[int, LoraWeights]:
    """Of several ranks and projections; one changes a single layer, and one nothing at all."""
    made = [
        random_weights(config, 1, rank=RANK),
        random_weights(config, 2, rank=4, targets=("q_proj", "v_proj")),
        random_weights(config, 3, rank=3, targets=("k_proj", "o_proj", "up_proj"), layers=[1]),
        random_weights(config, 4, rank=RANK, targets=("gate_proj", "down_proj")),
        random_weights(config, 5, targets=()),
    ]
    return {adapter.identity: adapter for adapter in made}


@pytest.fixture(scope="module")
def make(folder: Path, config: LlamaConfig, adapters: dict[int, LoraWeights]) -> Make:
    def made(*, num_shards: int = 1, quantization: str | None = None, in_c: bool = False, **limits) -> ModelRunner:
        mesh = make_mesh(num_shards) if num_shards > 1 else None
        form = form_named(quantization, config.projection_inputs) if quantization else None
        model = load_hf(folder, config, dtype=jnp.float32, mesh=mesh, quantization=form)
        attention = paged_attention(model.config, page_size=16, mesh=mesh)
        if in_c:
            attention = PagedAttention(attention.spec, Backend.CPU, mesh)
        if in_c and mesh is None:
            pack_for_cpu(model)
        settings = RunnerConfig(**LIMITS | {"max_loras": MAX_LORAS, "max_lora_rank": RANK} | limits)
        return ModelRunner(model, attention, settings, adapter_weights=adapters.__getitem__)

    return made


@pytest.fixture(scope="module")
def runner(make: Make) -> ModelRunner:
    made = make()
    without = [replace(bucket, has_adapters=False) for bucket in (PROMPT, DECODE)]
    made.warm_up([PROMPT, DECODE, *without], print)
    return made


@pytest.fixture(scope="module")
def oracle(folder: Path, config: LlamaConfig, adapters: dict[int, LoraWeights], tmp_path_factory) -> Callable[..., Any]:
    """f32[n, V]: the logits of the model into which an adapter is merged; 0: of the base model."""
    models = {}

    def logits(adapter: int, tokens: list[int]) -> np.ndarray:
        if adapter not in models:
            tensors = checkpoints.tensors(VARIANT)
            of_adapter = folder if adapter == 0 else tmp_path_factory.mktemp("merged")
            if adapter:
                (of_adapter / "config.json").write_bytes((folder / "config.json").read_bytes())
                checkpoints.write_tensors(of_adapter, merged(tensors, adapters[adapter]))
            models[adapter] = load_hf(of_adapter, config, dtype=jnp.float32)
        return np.asarray(dense_logits(models[adapter], np.array(tokens, np.int32)))

    return logits


def rows(*slots: int, sampling: SamplingParams = WITH_LOGPROBS) -> list[Row]:
    prompts = [[5, 6, 7, 8, 9], [3, 1, 4], [11, 2, 2, 9, 30], [8, 8, 2]]
    return [
        Row(number, prompt, [3 * number + page for page in (1, 2, 3)], sampling, adapter_slot=slot)
        for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=False))
    ]


def bring(runner: ModelRunner, *adapters: int) -> tuple[AdapterWrite, ...]:
    """Stages the adapters for the slots 1, 2, ..."""
    for adapter in adapters:
        runner.stage(WeightsKind.ADAPTER, adapter)
    return tuple(AdapterWrite(slot=slot, adapter=adapter) for slot, adapter in enumerate(adapters, 1))


def prefill(runner: ModelRunner, asked: list[Row], bucket: Bucket = PROMPT, **options) -> StepOutput:
    return run(runner, bucket, [(row, len(row.prompt)) for row in asked], admit=asked, **options)


def assert_tokens_of(oracle: Callable[..., np.ndarray], adapter: int, row: Row) -> None:
    logits = oracle(adapter, row.tokens[:-1])[len(row.prompt) - 1 :]
    assert row.output == logits.argmax(axis=-1).tolist(), (adapter, row)


@pytest.fixture(scope="module")
def in_c(make: Make) -> ModelRunner:
    made = make(in_c=True)
    made.warm_up([PROMPT, DECODE], print)
    return made


@pytest.fixture(scope="module")
def in_c_on_two_devices(make: Make) -> ModelRunner:
    made = make(in_c=True, num_shards=2)
    made.warm_up([PROMPT, DECODE], print)
    return made


@pytest.mark.parametrize("quartet", [(1, 2, 3), (4, 5, 1)])
@pytest.mark.parametrize("fixture", ["runner", "in_c", "in_c_on_two_devices"])
def test_each_row_draws_as_the_merged_model_does(request, oracle, fixture, quartet) -> None:
    runner = request.getfixturevalue(fixture)
    asked = rows(1, 0, 2, 3)
    first = prefill(runner, asked, adapters=bring(runner, *quartet))
    for _ in range(8):
        run(runner, DECODE, [(row, 1) for row in asked])
    for number, row in enumerate(asked):
        adapter = (0, *quartet)[row.adapter_slot]
        assert_tokens_of(oracle, adapter, row)
        logits = oracle(adapter, row.prompt)[-1]
        expected = logits[row.output[0]] - np.logaddexp.reduce(logits)
        assert abs(float(first.logprobs[number, 0]) - expected) < 2e-4
    assert len({tuple(row.output) for row in asked}) == 4


@pytest.mark.parametrize(("backend", "num_shards"), [(Backend.REFERENCE, 1), (Backend.CPU, 1), (Backend.CPU, 2)])
def test_the_numbers_are_those_of_peft(tmp_path, backend, num_shards) -> None:
    """All golden adapters, three at once, beside a row without one."""
    config, names = goldens.base_config(), sorted(goldens.ADAPTERS)
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    model = load_hf(checkpoints.write(tmp_path, goldens.BASE), config, dtype=jnp.float32, mesh=mesh)
    store = AdapterStore(config, max_rank=RANK, max_cpu=2)
    of_name = {name: store.load(goldens.folder(name)) for name in names}
    attention = PagedAttention(paged_attention(model.config, page_size=16).spec, backend, mesh)
    settings = RunnerConfig(**LIMITS, max_loras=3, max_lora_rank=RANK)
    if backend is Backend.CPU and mesh is None:
        pack_for_cpu(model)
    runner = ModelRunner(model, attention, settings, adapter_weights=store.weights)
    prompt = replace(PROMPT, num_tokens=LIMITS["max_num_batched_tokens"], variant=Variant.SCORE)
    runner.warm_up([prompt, DECODE], print)
    tokens = goldens.prompt().tolist()
    for name in names:
        others = [other for other in names if other != name][:2]
        writes = bring(runner, *(of_name[each] for each in (others[0], name, others[1])))
        row, beside = rows(2, 0)
        row.prompt = tokens
        output = prefill(runner, [row, beside], prompt, adapters=writes)
        for _ in range(7):
            run(runner, DECODE, [(row, 1)])
        logits, greedy = goldens.golden(name)
        assert row.output == greedy, name
        raw = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        expected = raw[np.arange(len(tokens) - 1), tokens[1:]]
        assert np.abs(output.target_logprobs[: len(tokens) - 1] - expected).max() < 2e-4, name


def logprobs_of(runner: ModelRunner, slots: tuple[int, ...], prompt: Bucket, *written: int) -> np.ndarray:
    """f32[5]: of the tokens of the first row, among rows of these slots."""
    asked = rows(*slots)
    found = [prefill(runner, asked, prompt, adapters=bring(runner, *written)).logprobs[0, 0]]
    bucket = replace(DECODE, variant=Variant.SAMPLE, has_adapters=prompt.has_adapters)
    return np.array(found + [run(runner, bucket, [(row, 1) for row in asked]).logprobs[0, 0] for _ in range(4)])


@pytest.mark.parametrize("slot", [0, 1])
def test_a_rows_numbers_do_not_depend_on_the_other_rows_nor_slots(make, slot) -> None:
    runner = make()
    runner.warm_up([PROMPT, replace(DECODE, variant=Variant.SAMPLE)], print)
    alone = logprobs_of(runner, (slot,), PROMPT, 1)
    for slots, others in (((slot, 2, 3, 0), (2, 3)), ((slot, 3, 1, 1), (4, 2)), ((slot, 0, 0, 0), (5, 4))):
        shared = logprobs_of(runner, slots, PROMPT, 1, *others)
        assert shared.tobytes() == alone.tobytes()


def test_base_rows_have_the_same_numbers_in_programs_without_adapters(make) -> None:
    runner, without = make(), replace(PROMPT, has_adapters=False)
    decodes = [replace(DECODE, variant=Variant.SAMPLE, has_adapters=has) for has in (False, True)]
    runner.warm_up([PROMPT, without, *decodes], print)
    mixed = logprobs_of(runner, (0, 1, 2, 3), PROMPT, 1, 2, 3)
    assert logprobs_of(runner, (0, 0, 0, 0), without).tobytes() == mixed.tobytes()


def draw(runner: ModelRunner, bucket: Bucket, asked: list[Row], count: int) -> StepOutput:
    """A step with drafts in which each row brings `count` tokens."""
    width = SlotLayout.width(runner.capacity().pages_per_seq)
    step = packed_step(bucket, [(row, 1) for row in asked], num_slots=runner.capacity().num_slots, width=width)
    sections = PackedLayout(bucket).sections()
    step.packed[sections["q_lens"]][: len(asked)] = count
    step.packed[0], step.packed[2] = 0, count * len(asked)
    step.packed[sections["tokens"]] = -1
    return runner.execute(step).result()


def test_drafts_are_verified_with_the_rows_own_adapter(make, oracle) -> None:
    runner = make(lookup=PromptLookup(min_tokens=1, max_tokens=3), max_draft_rows=4, max_drawn=12)
    runner.warm_up([PROMPT, DRAFTS], print)
    asked = rows(1, 0, 2, 3)
    prefill(runner, asked, adapters=bring(runner, 1, 2, 4))
    for _ in range(6):
        output = draw(runner, DRAFTS, asked, 3)
        for number, row in enumerate(asked):
            row.output += output.tokens[number, : 1 + output.num_accepted[number]].tolist()
            row.num_computed = len(row.tokens) - 1
    for row in asked:
        assert_tokens_of(oracle, (0, 1, 2, 4)[row.adapter_slot], row)


def test_chips_share_the_adapters(make, oracle) -> None:
    """Each holds a part of every adapter, and gqa2's KV heads are repeated over four."""
    runner = make(num_shards=4)
    runner.warm_up([PROMPT, DECODE], print)
    a, (b,) = runner.adapters[0]["attention.out"]
    assert a.sharding.shard_shape(a.shape)[-1] * 4 == a.shape[-1]
    assert b.sharding.is_fully_replicated
    asked = rows(1, 0, 2, 3)
    prefill(runner, asked, adapters=bring(runner, 1, 2, 3))
    for _ in range(4):
        run(runner, DECODE, [(row, 1) for row in asked])
    for row in asked:
        assert_tokens_of(oracle, row.adapter_slot, row)


def test_a_quantised_base_has_the_adapters_sums_besides_its_own(make, oracle) -> None:
    base, with_adapter = make(quantization="int8"), make(quantization="int8")
    found = []
    for runner, slots in ((base, (0,)), (with_adapter, (1,))):
        runner.warm_up([PROMPT, replace(DECODE, variant=Variant.SAMPLE)], print)
        found.append(logprobs_of(runner, slots, PROMPT, 5))  # an adapter that changes nothing
    assert found[0].tobytes() == found[1].tobytes()
    asked = rows(1)
    prefill(with_adapter, asked, adapters=bring(with_adapter, 1))
    expected = oracle(1, asked[0].prompt)[-1]
    assert asked[0].output[0] in np.argsort(expected)[-3:]  # 8 bits change the sums a little


def test_a_projection_in_parts_takes_adapters_as_a_whole_one_does(make) -> None:
    fused = "int4-g16-f16"
    parts = ",".join(
        f"layers.{layer}.{part}" for layer in range(3) for part in ("attention.qkv.v_proj", "mlp.gate_up.up_proj")
    )
    found = []
    for quantization in (fused, f"{fused}+{fused}:{parts}"):
        runner = make(quantization=quantization)
        runner.warm_up([PROMPT, replace(DECODE, variant=Variant.SAMPLE)], print)
        found.append(logprobs_of(runner, (1,), PROMPT, 1))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_a_slot_is_written_by_one_program_in_place(runner) -> None:
    program = runner.described.updates()[WRITE_ADAPTER]
    analysis = program.lower().compile().memory_analysis()
    assert analysis is not None
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.adapters))
    assert analysis.alias_size_in_bytes == held
    assert analysis.temp_size_in_bytes < held // MAX_LORAS


def test_a_runner_that_has_recovered_holds_no_adapters(make, oracle) -> None:
    runner = make()
    runner.warm_up([PROMPT, DECODE], print)
    asked = rows(1)
    prefill(runner, asked, adapters=bring(runner, 1))
    runner.stage(WeightsKind.ADAPTER, 2)
    runner.recover()
    assert not any(leaf.any() for leaf in jax.tree.leaves(runner.adapters))
    with pytest.raises(KeyError):
        prefill(runner, rows(1), adapters=(AdapterWrite(slot=1, adapter=2),))
    again = rows(1)
    prefill(runner, again, adapters=bring(runner, 1))
    assert again[0].output == asked[0].output


def test_the_plan_has_room_for_slots_and_staged_adapters(config) -> None:
    def needs(**limits):
        mesh = make_mesh(2)
        model = abstract_model(config, dtype=jnp.float32, mesh=mesh)
        return memory_needs(model, paged_attention(model.config, mesh=mesh), RunnerConfig(**LIMITS | limits))

    held = needs(max_loras=1).state - needs().state
    assert needs(max_loras=8, max_lora_rank=16).state - needs().state == held // 3 * 10
    assert needs(max_loras=1, max_lora_rank=32).state - needs().state == 2 * held
    d, f, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    # Of one adapter on one of two chips: halves of all that is beside a split side of a projection.
    a, b = 3 * d + d // 2 + 2 * d + f // 2, d // 2 + kv + d + f + d
    assert held == 3 * 16 * 4 * config.num_layers * (a + b)


@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_adapters_exchange_no_more_than_the_inputs_of_two_products(config, num_shards) -> None:
    """XLA's CPU backend joins no all-reduces; those of chips do (`tests.pallas_kernels.tpu.test_compile`)."""
    wide = replace(config, num_heads=8, num_kv_heads=8, intermediate_size=64, head_dim=8)
    mesh = make_mesh(num_shards)
    model = abstract_model(wide, dtype=jnp.float32, mesh=mesh)
    limits = RunnerConfig(**LIMITS, max_loras=MAX_LORAS, max_lora_rank=RANK)
    runner = ModelRunner(model, paged_attention(model.config, mesh=mesh), limits)
    found = {
        has: collectives(runner.described.step(replace(DECODE, has_adapters=has)).lower().compile().as_text())
        for has in (False, True)
    }
    more = len(found[True]) - len(found[False])
    assert more == 2 * wide.num_layers
    small = [c for c in found[True] if c.shape and c.shape[-1] == MAX_LORAS * RANK]
    assert len(small) == more
    assert {c.kind for c in small} == {"all-reduce"}
