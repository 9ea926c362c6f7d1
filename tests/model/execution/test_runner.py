"""The runner: one program per bucket, nothing compiled later, nothing copied, one buffer each way."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from batcher.grammar import num_mask_words
from batcher.request import SamplingParams
from batcher.slots import SlotLayout
from batcher.step import PATCH_BLOCK, Bucket, PackedLayout, StepInput, Variant
from model.config import LlamaConfig
from model.execution import memory_plan
from model.execution import runner as runner_module
from model.execution.device_memory import DeviceMemory
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.execution.step_programs import StepPrograms
from model.loading import weights
from model.network.sharding import abstract_model, make_mesh
from tests.model import checkpoints
from tests.model.driver import TINY, Row, int8_scales, pack, paged_attention, run, tiny_model, tiny_runner

SLOTS = 4
BUCKETS = [Bucket(4, 4, Variant.GREEDY), Bucket(24, 4, Variant.GREEDY), Bucket(4, 4, Variant.SAMPLE)]


@pytest.fixture(scope="module")
def runner():
    made = tiny_runner()
    lines = []
    made.warm_up(BUCKETS, lines.append)
    # Every bucket, and the three updates next to the step.
    assert re.match(rf"compiled {len(BUCKETS) + 3} programs in [\d.]+ s", lines[0])
    return made


@pytest.mark.parametrize(("enough_s", "count", "times"), [(math.inf, 3, 1), (0.0, 1, 1), (math.inf, 3, 2)])
def test_programs_are_run_before_they_are_needed_as_long_as_a_cpu_has_time(monkeypatch, enough_s, count, times):
    """On a GPU twice: the second run makes the graph."""
    monkeypatch.setattr("model.execution.runner.CPU_FIRST_RUNS_S", enough_s)
    monkeypatch.setattr(StepPrograms, "has_graphs", times == 2)
    made, lines = tiny_runner(), []
    ran = []
    execute = made.execute
    monkeypatch.setattr(made, "execute", lambda step: (ran.append(step.bucket), execute(step))[1])
    made.warm_up(BUCKETS, lines.append)
    assert ran == [bucket for bucket in sorted(BUCKETS)[:count] for _ in range(times)]
    assert re.match(rf"ran {count} of 3 programs once in [\d.]+ s", lines[1])


def test_traffic_compiles_nothing(runner):
    before = runner.num_compiles
    rows = [Row(slot, [slot + 1] * (slot + 2), [2 * slot + 1, 2 * slot + 2]) for slot in range(3)]
    run(runner, BUCKETS[1], [(row, len(row.prompt)) for row in rows], admit=rows)
    for bucket in (BUCKETS[0], BUCKETS[2], BUCKETS[1]):
        run(runner, bucket, [(row, 1) for row in rows])
        run(runner, bucket, [(row, 1) for row in rows[:1]])
    assert runner.num_compiles == before


def test_a_compilation_that_nobody_meant_is_counted(runner):
    before = runner.num_compiles
    jax.jit(lambda x: x * 3 - 1)(np.ones(7, np.float32))
    assert runner.num_compiles > before


def test_a_bucket_without_program_is_refused(runner):
    bucket = Bucket(8, 4, Variant.GREEDY)
    with pytest.raises(KeyError, match="num_tokens=8"):
        runner.execute(StepInput(bucket=bucket, packed=np.zeros(PackedLayout(bucket).size, np.int32)))


def test_warm_up_writes_no_page_and_no_state():
    runner = tiny_runner()
    runner.warm_up([BUCKETS[1]], lambda line: None)
    for leaf in jax.tree.leaves(runner.state):
        assert not np.asarray(leaf).any()


@pytest.mark.parametrize("bucket", BUCKETS)
def test_state_is_updated_in_place(runner, bucket):
    """The compiler aliases all of the state to the output, and needs less besides it than one layer's pages."""
    analysis = runner.programs.steps[bucket].memory_analysis()
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    assert analysis.alias_size_in_bytes == state_bytes
    pages = tiny_runner(num_pages=4000)  # so many that a copy of one layer would stand out
    large = pages.described.step(bucket).lower().compile().memory_analysis()
    assert large.temp_size_in_bytes < pages.state.kv[0].nbytes / 2
    assert large.temp_size_in_bytes == analysis.temp_size_in_bytes


@pytest.mark.parametrize("bucket", BUCKETS)
def test_one_buffer_goes_in_and_one_comes_out(runner, bucket):
    program = runner.programs.steps[bucket]
    num_state = len(jax.tree.leaves(runner.state))
    num_arguments = len(jax.tree.leaves(program.in_avals))
    assert num_arguments == len(runner.weights) + num_state + 1
    assert len(jax.tree.leaves(program.out_info)) == num_state + 1


def test_a_step_is_one_call_that_is_sent_one_array(runner, monkeypatch):
    rows = [Row(slot, [slot + 3, slot + 4], [2 * slot + 1, 2 * slot + 2]) for slot in range(3)]
    run(runner, BUCKETS[1], [(row, 2) for row in rows], admit=rows)
    calls = []

    def counted(name, program):
        def call(*arguments):
            calls.append((name, sum(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arguments))))
            return program(*arguments)

        return call

    programs = runner.programs
    for name in ("patch", "reset_history", "bring_masks"):
        monkeypatch.setattr(programs, name, counted(name, getattr(programs, name)))
    steps = {bucket: counted("step", program) for bucket, program in programs.steps.items()}
    monkeypatch.setattr(programs, "steps", steps)
    for bucket in (BUCKETS[0], BUCKETS[2], BUCKETS[1]):
        run(runner, bucket, [(row, 1) for row in rows])
    assert calls == [("step", 1)] * 3


def test_execute_runs_ahead_of_the_results(runner):
    """Two steps are dispatched before the first is read; the second reads its tokens on the device."""
    row, same = Row(0, [9, 8, 7], [1, 2]), Row(0, [9, 8, 7], [1, 2])
    run(runner, BUCKETS[1], [(row, 3)], admit=[row])
    for _ in range(2):
        run(runner, BUCKETS[0], [(row, 1)])
    run(runner, BUCKETS[1], [(same, 3)], admit=[same])
    packed = np.zeros(PackedLayout(BUCKETS[0]).size, np.int32)
    parts = PackedLayout(BUCKETS[0]).sections()
    packed[:3] = 1
    packed[parts["slots"]] = [0, SLOTS, SLOTS, SLOTS]
    packed[parts["q_lens"]] = packed[parts["emits"]] = [1, 0, 0, 0]
    packed[parts["tokens"]] = -1
    packed[parts["patch_indices"]] = SLOTS * runner.state.slots.shape[1]
    handles = [runner.execute(StepInput(bucket=BUCKETS[0], packed=packed)) for _ in range(2)]
    assert [int(handle.result().tokens[0, 0]) for handle in handles] == row.output[1:]


@pytest.mark.parametrize("decode", [BUCKETS[0], BUCKETS[2]])
def test_outputs_are_written_into_those_that_were_read(runner, monkeypatch, decode):
    """As on a GPU: with two steps in flight, two buffers take turns, and none is made later."""
    row, same = Row(0, [9, 8, 7], [1, 2]), Row(0, [9, 8, 7], [1, 2])
    run(runner, BUCKETS[1], [(row, 3)], admit=[row])
    for _ in range(6):
        run(runner, decode, [(row, 1)])
    monkeypatch.setattr(StepPrograms, "has_graphs", True)
    made = tiny_runner()
    made.warm_up(BUCKETS, lambda line: None)
    run(made, BUCKETS[1], [(same, 3)], admit=[same])
    packed = pack(decode, [(same, 1)], num_slots=SLOTS, width=runner.state.slots.shape[1]).packed
    packed[PackedLayout(decode).sections()["tokens"]] = -1  # the token that the step before has drawn
    in_flight, drawn, buffers, make = [], [], [], made._output_buffer
    monkeypatch.setattr(made, "_output_buffer", lambda bucket: buffers.append(bucket) or make(bucket))
    for _ in range(6):
        if len(in_flight) == 2:
            drawn.append(int(np.array(in_flight.pop(0).result().tokens)[0, 0]))
        in_flight.append(made.execute(StepInput(bucket=decode, packed=packed)))
    drawn += [int(handle.result().tokens[0, 0]) for handle in in_flight]
    assert drawn == row.output[1:]
    assert buffers == [decode]  # the other one is of the warm-up


def test_a_lost_state_is_made_anew_without_compiling(runner):
    def generate() -> list[int]:
        row = Row(0, [3, 1, 4, 1, 5], [2])
        run(runner, BUCKETS[1], [(row, len(row.prompt))], admit=[row])
        for _ in range(4):
            run(runner, BUCKETS[0], [(row, 1)])
        return row.output

    expected = generate()
    before = runner.num_compiles
    for array in jax.tree.leaves(runner.state)[:3]:
        array.delete()  # as a program does that was given it and failed
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        generate()
    runner.recover()
    assert generate() == expected
    assert runner.num_compiles == before


def test_more_patches_than_a_step_carries(runner):
    """The driver sends whole slots ahead of the step: several blocks of them."""
    rows = [Row(slot, [5, 6, slot], [slot + 1]) for slot in range(4)]
    width = runner.state.slots.shape[1]
    assert 4 * width <= PATCH_BLOCK < 8 * width
    run(runner, BUCKETS[1], [(row, 3) for row in rows], admit=rows + rows)
    alone = Row(2, [5, 6, 2], [9])
    run(runner, BUCKETS[1], [(alone, 3)], admit=[alone])
    assert alone.output == rows[2].output


def test_pages_are_planned_where_no_number_is_given():
    # Four requests of eight pages, and as many again for the prefix cache.
    assert tiny_runner(num_pages=None).capacity().num_pages == 64


def test_only_the_weights_that_the_programs_are_for_are_taken():
    runner = tiny_runner()
    other = abstract_model(replace(TINY, vocab_size=64), dtype=jnp.float32)
    with pytest.raises(ValueError, match="not the weights"):
        runner.place(other)


def test_memory_for_weights_that_are_still_to_come_is_kept_free(monkeypatch):
    """The same plan before loading as after it."""
    loaded = tiny_model()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(loaded)))
    limits = RunnerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=24, max_model_len=64)
    temporaries = memory_plan.temporaries_bound(TINY, num_tokens=24, num_rows=SLOTS, itemsize=4, num_shards=1)
    width = SlotLayout.width(64 // paged_attention().spec.page_size)
    slots = SLOTS * 4 * (width + TINY.vocab_size + num_mask_words(TINY.vocab_size))
    free = size + temporaries + slots + 41 * TINY.num_layers * paged_attention().page_bytes()
    found = []
    for model, taken in ((loaded, size), (abstract_model(TINY, dtype=jnp.float32), 0)):
        memory = DeviceMemory(total=1 << 40, free=free - taken, is_host=False)
        monkeypatch.setattr(runner_module, "device_memory", lambda _device, memory=memory: memory)
        found.append(ModelRunner(model, paged_attention(), limits).capacity().num_pages)
    assert found == [40, 40]  # and page 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write(tmp_path_factory.mktemp("checkpoint"), "gqa2")


LET_THROUGH = (3, 31, 32, 64)


def mask_of(tokens, vocab_size):
    bits = np.zeros(num_mask_words(vocab_size) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


SAMPLED = SamplingParams(max_tokens=64, temperature=1.2, top_p=0.9, top_k=50, frequency_penalty=0.5, logprobs=3)


def texts_of(folder, num_shards, decode, kv_dtype=jnp.float32):
    config = LlamaConfig.from_file(folder)
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    like = abstract_model(config, dtype=jnp.float32, mesh=mesh)
    limits = RunnerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=24, max_model_len=64, num_pages=16)
    attention = paged_attention(like.config, mesh=mesh, kv_dtype=kv_dtype)
    runner = ModelRunner(like, attention, limits)
    prompt = BUCKETS[1]
    runner.start_compiling([prompt, decode])  # the weights come meanwhile
    model = weights.load_hf(folder, config, dtype=jnp.float32, mesh=mesh)
    runner.place(model, int8_scales(model) if attention.spec.has_kv_scales else None)
    lines = []
    runner.warm_up([prompt, decode], lines.append)
    assert re.match(r"compiled 5 programs in [\d.]+ s\t, [\d.]+ s of them after loading", lines[0])
    before = runner.num_compiles
    rows = [Row(0, [5, 6, 7, 8, 9, 10], [1, 2, 3]), Row(2, [3, 1, 4], [7, 8, 9])]
    if decode.variant is Variant.SAMPLE:
        rows.append(Row(3, [8, 8, 2], [4, 5, 6], SAMPLED, seed=11))
        rows.append(Row(1, [8, 8, 2], [10, 11, 12], SAMPLED, seed=11, mask=mask_of(LET_THROUGH, config.vocab_size)))
    run(runner, prompt, [(rows[0], 4), *((row, 3) for row in rows[1:])], admit=rows)
    run(runner, prompt, [(rows[0], 2), *((row, 1) for row in rows[1:])])
    for _ in range(8):
        run(runner, decode, [(row, 1) for row in rows])
    assert runner.num_compiles == before
    assert all(len(kv.sharding.device_set) == num_shards for kv in runner.state.kv)
    history = runner.state.history
    assert history.sharding.shard_shape(history.shape) == (SLOTS, config.vocab_size // num_shards)
    drawn = [row.output[2:] for row in rows if row.mask is not None]  # the prompt program draws nothing
    assert all(set(tokens) <= set(LET_THROUGH) for tokens in drawn)
    return [row.output for row in rows]


@pytest.fixture(scope="module")
def texts_of_one_device(checkpoint):
    kinds = [(BUCKETS[0], jnp.float32), (BUCKETS[2], jnp.int8)]
    return {(decode, kv_dtype): texts_of(checkpoint, 1, decode, kv_dtype) for decode, kv_dtype in kinds}


@pytest.mark.parametrize(
    ("num_shards", "decode", "kv_dtype"), [(2, BUCKETS[0], jnp.float32), (4, BUCKETS[2], jnp.int8)]
)
def test_a_mesh_gives_the_tokens_of_one_device(checkpoint, texts_of_one_device, num_shards, decode, kv_dtype):
    """Four shards of a model with two KV heads: they are replicated."""
    assert texts_of(checkpoint, num_shards, decode, kv_dtype) == texts_of_one_device[decode, kv_dtype]


def test_chips_update_their_parts_of_the_state_in_place(two_passes):
    mesh = make_mesh(2)
    model = abstract_model(replace(TINY, vocab_size=2000), dtype=jnp.float32, mesh=mesh)
    slots = 500  # so many that a copy of a chip's part of the histories would stand out
    limits = RunnerConfig(max_num_seqs=slots, max_num_batched_tokens=1000, max_model_len=64, num_pages=16)
    runner = ModelRunner(model, paged_attention(model.config, mesh=mesh), limits)
    analysis = runner.described.step(BUCKETS[2]).lower().compile().memory_analysis()
    parts = [math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(runner.described.state_like)]
    assert analysis.alias_size_in_bytes == sum(parts)
    assert analysis.temp_size_in_bytes < slots * 1000 * 4 / 2


def test_programs_that_were_left_come_later():
    limits = RunnerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=24, max_model_len=64, num_pages=40)
    runner, lines = ModelRunner(tiny_model(), paged_attention(), limits), []
    left = runner.warm_up(BUCKETS, lines.append, BUCKETS[:2])
    assert left == BUCKETS[:2]
    assert re.match(r"compiled 4 programs in .*; 2 more come while serving", lines[0])
    with pytest.raises(KeyError, match="has no program"):
        runner.execute(runner.described.padding(left[0]))
    before = runner.num_compiles
    for bucket in left:
        runner.compile_later(bucket)
        runner.execute(runner.described.padding(bucket)).result()
    assert runner.num_compiles == before


def test_the_program_that_stands_in_draws_the_same_tokens():
    """A decode in its own program, in one that samples, and in one of more tokens that scores, too."""
    runner, decodes = tiny_runner(), [BUCKETS[0], BUCKETS[2], Bucket(24, 4, Variant.SCORE)]
    runner.warm_up(decodes, print)

    def generate(bucket: Bucket, sampling: SamplingParams) -> list[int]:
        row = Row(1, [3, 1, 4, 1, 5], [2, 3, 4], sampling, seed=5)
        run(runner, decodes[2], [(row, 5)], admit=[row])
        for _ in range(10):
            run(runner, bucket, [(row, 1)])
        return row.output

    greedy = SamplingParams(max_tokens=64, temperature=0)
    assert generate(decodes[0], greedy) == generate(decodes[1], greedy) == generate(decodes[2], greedy)
    assert generate(decodes[1], SAMPLED) == generate(decodes[2], SAMPLED)
