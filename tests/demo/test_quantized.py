"""What 8 bits a weight, or 8 bits of K/V, cost the demo: the divergence from float32 tells, its sums hardly notice."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from model.network.llama import Llama
from model.network.packed import pack_for_cpu
from model.quantization.forms import EightBit, FourBit, Rounding, ScaleFormat, WeightForm
from pallas_kernels.cpu import library
from scripts.lab.demo import evaluate
from scripts.lab.demo.agreement import agreement, with_narrow_kv
from scripts.lab.demo.tokenizer import SampleEncoder
from tests.c_compiler import NATIVE, compiler
from tests.model import checkpoints, nvfp4

pytestmark = pytest.mark.slow

NVFP4 = FourBit(group=16, numbers=ScaleFormat.NVFP4)
NUM_STORIES = 12  # 1,500 tokens: enough for a divergence, and for some other most likely tokens


@pytest.fixture(scope="module")
def encoder() -> SampleEncoder:
    return SampleEncoder(Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")), prompt_weight=0.0)


def packed() -> Llama:
    """Products as a CPU's C code computes them, with inputs rounded to int8."""
    compiler()
    library.load(NATIVE)
    model = pack_for_cpu(demo(EightBit.INT8, rounding=Rounding()))
    assert model.layers[0].mlp.down.kernel.ndim == 3
    return model


def demo(form: WeightForm | None = None, **options) -> Llama:
    return load_hf(DEMO_FOLDER, LlamaConfig.from_file(DEMO_FOLDER), dtype=jnp.float32, quantization=form, **options)


@pytest.fixture(scope="module")
def exact() -> Llama:
    return demo()


@pytest.mark.parametrize(
    ("narrow", "divergence", "same"),
    [
        pytest.param(lambda _: demo(EightBit.INT8), 1e-4, 0.98, id="int8"),
        pytest.param(lambda _: packed(), 1e-4, 0.98, id="int8 with inputs in int8, in C"),
        pytest.param(lambda _: demo(EightBit.FP8), 1e-3, 0.95, id="fp8"),
        pytest.param(lambda _: demo(EightBit.FP8, rounding=Rounding(with_head=True)), 3e-3, 0.95, id="fp8, and inputs"),
        pytest.param(lambda _: demo(FourBit(group=128)), 1e-2, 0.95, id="int4"),
        pytest.param(with_narrow_kv, 1e-3, 0.98, id="keys and values of int8"),
    ],
)
def test_it_stays_near_the_exact_model(exact, encoder, narrow, divergence, same):
    model = narrow(exact)
    near = agreement(exact, model, encoder, NUM_STORIES)
    assert 0 < near.divergence < divergence
    assert same < near.same_top_token < 1
    sums = evaluate.suites()["held_out_sums"][:50]
    assert sum(evaluate.exact(model, encoder, sums)) >= 0.95 * len(sums)


@pytest.mark.parametrize("name", nvfp4.CONFIGS)
def test_nvfp4_says_what_its_dequantised_weights_say(tmp_path, encoder, name):
    values = nvfp4.write(tmp_path / "packed", DEMO_FOLDER, name)
    (tmp_path / "config.json").write_text((DEMO_FOLDER / "config.json").read_text())
    checkpoints.write_tensors(tmp_path, {key: value.astype(np.float32) for key, value in values.items()})
    prompts = [encoder.prompt(None, (), text) for text in ("hi", "What is 17 + 25?", "Tell me a story.")]
    said = []
    for folder, form in ((tmp_path, None), (tmp_path / "packed", NVFP4)):
        model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32, quantization=form)
        said.append(evaluate.generate(model, encoder, prompts, 40))
    assert said[0] == said[1]
    assert "42" in encoder.tokenizer.decode(said[1][1])
