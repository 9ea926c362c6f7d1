"""New weights, pauses and sleep of an LLM in Python, over a tiny model on the CPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.execution.host_copy import DEVICE
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer
from scripts.lab.demo.export import hf_tensors, save_hf
from scripts.llm import LLM, Pending, SamplingParams
from tests.conftest import COMPILED
from tests.model.driver import TINY, dense_logits, tiny_model
from tests.model.loaded import flat

CONFIG = replace(TINY, vocab_size=544, hidden_size=64, intermediate_size=96, max_position_embeddings=128)
PROMPT = list(range(40, 60))
NUM_TOKENS = 24  # of an output
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def model_of(seed: int):
    return tiny_model(seed, CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_hf(model_of(0), folder, dtype=jnp.float32)
    write_stand_in_tokenizer(folder, CONFIG.vocab_size)
    return folder


@pytest.fixture(scope="module")
def one(folder):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 16, "num_pages": 24}
    with LLM(str(folder), device="cpu", compile_cache=str(COMPILED), **limits) as llm:
        yield llm


@pytest.fixture(scope="module")
def first_models(one):
    """What the LLM gives before the first update, by type."""
    assert one.weight_version == "default"
    return {dtype: flat(one.model(dtype)) for dtype in ("float32", "bfloat16")}


@pytest.fixture
def llm(one, first_models):
    """With the weights of the checkpoint, awake and serving."""
    one.update_weights(nnx.state(model_of(0)), names="own", version="first")
    yield one
    one.resume()


def is_greedy(model, prompt, output, start: int = 0) -> bool:
    """Whether the tokens from `start` on are those that the model prefers, after the tokens before them."""
    ids = [*prompt, *output]
    best = dense_logits(model, ids)[len(prompt) - 1 : -1].argmax(-1)
    return list(best[start:]) == list(output[start:])


def tokens(llm) -> tuple[int, ...]:
    return llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


@pytest.fixture
def halted(llm, monkeypatch):
    """Enqueues prompts. The result of a step waits after some results until a condition holds: when the function
    returns, the outputs have begun."""

    def enqueue(prompts: list[list[int]], until: Callable[[], bool]) -> Pending:
        execute, results, is_reached = llm.runner.execute, count(), threading.Event()

        class Held:
            def __init__(self, step) -> None:
                self._handle = execute(step)

            def result(self):
                if next(results) == 6:
                    is_reached.set()
                    while not until():
                        pass
                return self._handle.result()

        monkeypatch.setattr(llm.runner, "execute", Held)
        pending = llm.enqueue(prompts, GREEDY)
        assert is_reached.wait(60)
        return pending

    return enqueue


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_the_checkpoints_and_then_the_last_one_given(llm, first_models, dtype):
    llm.update_weights(nnx.state(model_of(1)), names="own")
    for seed, found in ((0, first_models[dtype]), (1, flat(llm.model(dtype)))):
        expected = flat(model_of(seed))
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value.astype(dtype), err_msg=path)
    with pytest.raises(ValueError, match="dtype: float32 or bfloat16, not 'int8'"):
        llm.model("int8")


def test_the_next_token_is_of_the_weights_that_were_given(llm):
    assert is_greedy(model_of(0), PROMPT, tokens(llm))
    given = nnx.state(model_of(1))
    llm.update_weights(given, names="own", version="step-1")
    (result,) = llm.generate([PROMPT], GREEDY)
    assert is_greedy(model_of(1), PROMPT, result.outputs[0].token_ids)
    assert not is_greedy(model_of(0), PROMPT, result.outputs[0].token_ids)
    assert llm.weight_version == result.outputs[0].weight_versions[-1][0] == "step-1"
    assert result.outputs[0].weight_versions == [("step-1", NUM_TOKENS)]

    model = model_of(2)
    params = {path: jnp.asarray(value) for path, value in flat(model).items()}
    llm.update_weights(hf_tensors(CONFIG, params, dtype=jnp.float32))
    assert is_greedy(model, PROMPT, tokens(llm))
    assert llm.weight_version.isdecimal()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "the engine has taken the trainer's arrays"
    num_compiles = llm.runner.num_compiles  # by this process, other programs than the engine's included
    llm.update_weights(given, names="own", donate=True)
    assert llm.runner.num_compiles == num_compiles
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert is_greedy(model_of(1), PROMPT, tokens(llm))


def test_weights_that_cannot_be_used_leave_the_old_ones(llm):
    for spoil, words in (
        (lambda state: state.pop("norm"), "missing: norm.scale"),
        (lambda state: state["norm"].update(scale=jnp.full(64, jnp.nan)), "norm.scale is not finite"),
    ):
        state = nnx.to_pure_dict(nnx.state(model_of(1)))
        spoil(state)
        with pytest.raises(ValueError, match=words):
            llm.update_weights(state, names="own")
    with pytest.raises(ValueError, match="requests: abort, wait, keep, not 'drop'"):
        llm.update_weights({}, requests="drop")
    assert llm.weight_version == "first" and not llm.is_paused
    assert is_greedy(model_of(0), PROMPT, tokens(llm))


def test_rollouts_go_on_with_new_weights(llm, halted):
    """Each token is of the weights that its result names, after all tokens before it."""
    pending = halted([PROMPT, PROMPT[:9]], until=lambda: not llm.engine._changes.allow_steps)
    llm.update_weights(nnx.state(model_of(1)), names="own", requests="keep", version="second")
    results = pending.wait()
    for prompt, result in zip((PROMPT, PROMPT[:9]), results, strict=True):
        (_, num_first), (_, num_second) = result.outputs[0].weight_versions
        assert [version for version, _ in result.outputs[0].weight_versions] == ["first", "second"]
        assert num_first > 0 and num_first + num_second == NUM_TOKENS
        before = is_greedy(model_of(0), prompt, result.outputs[0].token_ids[:num_first])
        assert before and is_greedy(model_of(1), prompt, result.outputs[0].token_ids, start=num_first)
    assert llm.stats().num_pages_used == 0


def test_rollouts_end_with_the_old_weights_if_they_are_waited_for(llm, halted):
    pending = halted([PROMPT], until=lambda: not llm.engine.core.scheduler.may_start)
    llm.update_weights(nnx.state(model_of(1)), names="own", requests="wait", version="second")
    (result,) = pending.wait()
    assert result.outputs[0].weight_versions == [("first", NUM_TOKENS)]
    assert is_greedy(model_of(0), PROMPT, result.outputs[0].token_ids)
    assert is_greedy(model_of(1), PROMPT, tokens(llm))


def test_rollouts_are_aborted_with_what_they_have(llm, halted):
    pending = halted([PROMPT], until=lambda: llm.engine._changes._is_paused)
    llm.update_weights(nnx.state(model_of(1)), names="own", version="second")
    (result,) = pending.wait()
    assert result.finished and result.outputs[0].finish_reason == "abort"
    assert 0 < len(result.outputs[0].token_ids) < NUM_TOKENS and result.outputs[0].weight_versions[-1][0] == "first"
    assert is_greedy(model_of(0), PROMPT, result.outputs[0].token_ids)
    assert is_greedy(model_of(1), PROMPT, tokens(llm))


def live_bytes() -> float:
    """Of the device, without the small arrays that steps leave."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if array.sharding.memory_kind == DEVICE]
    return pytest.approx(sum(array.nbytes for array in arrays), abs=200)


def test_sleep_lends_all_memory_and_takes_it_back_in_parts(llm):
    runner = llm.runner
    weights = sum(array.nbytes for array in runner.weights)
    state = sum(array.nbytes for array in jax.tree.leaves((runner.state, runner.adapters)))
    before, awake = tokens(llm), live_bytes().expected

    llm.sleep()
    assert llm.is_sleeping and live_bytes() == awake - weights - state
    with pytest.raises(RuntimeError, match=r"sleeps: wake_up\(\) first"):
        tokens(llm)
    pending = llm.enqueue([PROMPT], GREEDY)
    llm.wake_up(["weights"])
    assert live_bytes() == awake - state
    assert llm.is_sleeping and not pending.is_done
    llm.wake_up(["kv_cache"])
    assert pending.wait()[0].outputs[0].token_ids == before
    assert not llm.is_sleeping and live_bytes() == awake

    llm.sleep(level=2)
    assert live_bytes() == awake - weights - state
    with pytest.raises(ValueError, match=r"sleep\(level=2\) has dropped the weights"):
        llm.wake_up()
    llm.wake_up(["weights"])
    assert live_bytes() == awake - weights - state
    llm.update_weights(nnx.state(model_of(1)), names="own")
    assert llm.is_sleeping and live_bytes() == awake - state
    llm.wake_up()
    assert live_bytes() == awake
    assert is_greedy(model_of(1), PROMPT, tokens(llm))


def test_who_asks_for_sleep_in_other_words_is_told_the_right_ones(llm):
    with pytest.raises(ValueError, match="level: 1 or 2, not 3"):
        llm.sleep(3)
    for tags in (["model"], "weights"):
        with pytest.raises(ValueError, match="tags: a list of weights and kv_cache"):
            llm.wake_up(tags)
    llm.wake_up()
    assert not llm.is_sleeping
