"""Decodes of a Llama with random weights in PyTorch, and a load in transformers' continuous batching: an instrument for
a machine's own Python that has these. `torch_peers` runs it, and this module imports nothing of this program.

    python scripts/lab/chip/torch_decode.py JSON

A line of JSON for each measurement. A decode is one CUDA graph of compiled layers over a static cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any

WARM_UPS = 3


def emit(name: str, **figures: Any) -> None:
    """Prints the figures of a measurement."""
    print(json.dumps([name, figures]), flush=True)


def decoder(
    torch: Any, shape: dict[str, int], rows: int, length: int, device: str, *, compiles: bool
) -> Callable[[Any, Any], Any]:
    """A step: the next token of each row, from its last token and the position."""
    functional = torch.nn.functional
    width, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads, inner = shape["num_heads"], shape["num_kv_heads"], shape["intermediate_size"]

    def new(*sizes: int) -> Any:
        return torch.randn(sizes, dtype=torch.bfloat16, device=device) * 0.02

    embedding, head = new(shape["vocab_size"], width), new(shape["vocab_size"], width)
    layers = [
        {
            "qkv": new((heads + 2 * kv_heads) * dim, width),
            "out": new(width, heads * dim),
            "gate_up": new(2 * inner, width),
            "down": new(width, inner),
            "keys": new(rows, kv_heads, length, dim),
            "values": new(rows, kv_heads, length, dim),
        }
        for _ in range(shape["num_layers"])
    ]
    frequencies = 5e5 ** (-torch.arange(0, dim, 2, device=device) / dim)
    places = torch.arange(length, device=device)

    def norm(x: Any) -> Any:
        return functional.rms_norm(x, (width,))

    def rotated(x: Any, position: Any) -> Any:
        angles = position * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def block(x: Any, position: Any, mask: Any, layer: dict[str, Any]) -> Any:
        parts = functional.linear(norm(x), layer["qkv"]).view(rows, -1, 1, dim)
        q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
        layer["keys"].index_copy_(2, position, rotated(k, position))
        layer["values"].index_copy_(2, position, v)
        seen = functional.scaled_dot_product_attention(
            rotated(q, position), layer["keys"], layer["values"], attn_mask=mask, enable_gqa=True
        )
        x = x + functional.linear(seen.reshape(rows, -1), layer["out"])
        gate, up = functional.linear(norm(x), layer["gate_up"]).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, layer["down"])

    if compiles:  # once for all layers: a whole step takes the compiler a minute
        block = torch.compile(block, fullgraph=True, dynamic=False)

    def step(tokens: Any, position: Any) -> Any:
        x = embedding[tokens]
        mask = (places <= position)[None, None, None]
        for layer in layers:
            x = block(x, position, mask, layer)
        return functional.linear(norm(x), head).argmax(-1)

    return step


def time_decodes(torch: Any, asked: dict[str, Any], rows: int) -> None:
    """Times steps one after the other; each has the tokens of the one before."""
    device, context, steps = asked["device"], asked["context"], asked["steps"]
    on_gpu = device == "cuda"
    step = decoder(torch, asked["shape"], rows, context + WARM_UPS + steps, device, compiles=on_gpu)
    tokens = torch.zeros(rows, dtype=torch.long, device=device)
    position = torch.full((1,), context, dtype=torch.long, device=device)

    def advance() -> None:
        tokens.copy_(step(tokens, position))
        position.add_(1)

    begun = time.perf_counter()
    with torch.no_grad():
        for _ in range(WARM_UPS):
            advance()
        run = advance
        if on_gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                advance()
            run = graph.replay
            torch.cuda.synchronize()
        first_steps_s, begun = time.perf_counter() - begun, time.perf_counter()
        for _ in range(steps):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    step_ms = (time.perf_counter() - begun) / steps * 1e3
    emit(f"PyTorch, decode {rows}", step_ms=step_ms, tokens_per_s=rows / step_ms * 1e3, first_steps_s=first_steps_s)


def time_continuous_batching(torch: Any, asked: dict[str, Any]) -> None:
    """Times transformers' own batcher with requests of random tokens."""
    name = "transformers, continuous batching"
    if importlib.util.find_spec("transformers") is None:
        emit(name, not_measured="this Python has no transformers")
        return
    transformers = importlib.import_module("transformers")
    shape, load = asked["shape"], asked["load"]
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], head_dim=shape["head_dim"],
        intermediate_size=shape["intermediate_size"], num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(asked["device"]):
        model = transformers.LlamaForCausalLM(config).eval()
    prompts = torch.randint(0, shape["vocab_size"] * 9 // 10, (load["num_prompts"], load["input_len"])).tolist()
    chosen = transformers.GenerationConfig(
        max_new_tokens=load["output_len"], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    limits = {}
    if asked["device"] == "cpu":  # without limits it takes most of the memory for K/V
        few = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        limits["continuous_batching_config"] = few
    begun = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=chosen, **limits)
    seconds = time.perf_counter() - begun
    count = sum(len(answer.generated_tokens) for answer in answers.values())
    emit(name, output_tokens_per_s=count / seconds, tokens=count, seconds=seconds)


def main(asked: dict[str, Any]) -> None:
    """Runs what was asked for by its name."""
    torch = importlib.import_module("torch")
    emit("versions", torch=torch.__version__, cuda=torch.version.cuda)
    for rows in asked["rows"]:
        time_decodes(torch, asked, rows)
        if asked["device"] == "cuda":
            importlib.import_module("torch._dynamo").reset()
            torch.cuda.empty_cache()
    if asked["load"] is not None:
        time_continuous_batching(torch, asked)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
