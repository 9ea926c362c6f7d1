"""A checkpoint that says what a test wants, through the real server.

    write_puppet(tmp_path / "model", [["I look.", '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'], ["Done."]])

Attention and MLP are zero, so the next token depends on the last one only. Every piece of an answer is a token of its
own, with any bytes: an answer is a chain of tokens that ends with `<|eot_id|>`. The chat template shows nothing of the
messages. It counts the results of tools, and ends the prompt with the token that begins the answer of that number: the
first answer comes before any result. The last answer is given again from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from model.loading.source import DEMO_FOLDER

SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")
WIDTH, HEAD, INNER = 256, 64, 128  # of the hidden states, of an attention head, and of the MLP
# Results of tools have a role of their own in chat; in the other APIs they become messages of this role, too.
COUNT = "{% set n = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def write_puppet(
    folder: Path,
    answers: Sequence[Sequence[str | bytes]],
    *,
    ending: str = "",
    specials: Iterable[str] = (),
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint to `folder`, which must not be there, and returns it.

    Args:
        answers: the pieces of each answer. A piece that is the text of a special token is that token.
        ending: the end of the prompt's text, as of a template that opens a tag. It is a part of the answer's token.
        specials: further special tokens.
        config: fields of `config.json` that differ.
    """
    folder.mkdir(parents=True)
    starts = [f"<|answer_{i}|>{ending}" for i in range(len(answers))]
    special = [*SPECIALS, *specials, *starts]
    tokens: dict[str, int] = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    chains = [
        [start, *(piece if piece in special else _added(tokens, piece) for piece in answer), "<|eot_id|>"]
        for start, answer in zip(starts, answers, strict=True)
    ]
    ids = {**tokens, **{name: len(tokens) + i for i, name in enumerate(special)}}
    _write_weights(folder, ids, chains)
    size = -(-len(ids) // 64) * 64
    _write_config(folder, ids, {"vocab_size": size, **(config or {})})
    _write_tokenizer(folder, tokens, {name: ids[name] for name in special}, starts)
    return folder


def _added(tokens: dict[str, int], piece: str | bytes) -> str:
    """The piece as a new token, in the tokenizer's characters."""
    data = piece.encode() if isinstance(piece, str) else piece
    name = "".join(CHAR_OF_BYTE[byte] for byte in data)
    if name in tokens:
        raise ValueError(
            f"{piece!r}: every piece must be another one, of two bytes or more: a token has one next token"
        )
    tokens[name] = len(tokens)
    return name


def _write_weights(folder: Path, ids: dict[str, int], chains: list[list[str]]) -> None:
    """Embeddings that are nearly orthogonal, and a head whose rows are sums of those of the tokens before."""
    size = -(-len(ids) // 64) * 64
    embeddings = np.random.default_rng(0).standard_normal((size, WIDTH)).astype(np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    head = np.zeros_like(embeddings)
    for chain in chains:
        for before, after in pairwise(chain):
            head[ids[after]] += 2 * embeddings[ids[before]]  # the norm's output is sqrt(WIDTH) long: a logit of 32
    layer = "model.layers.0"
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (WIDTH // 2, WIDTH),
        "self_attn.v_proj": (WIDTH // 2, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(WIDTH, np.float32),
        f"{layer}.input_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{layer}.post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
        **{f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_config(folder: Path, ids: dict[str, int], fields: dict[str, Any]) -> None:
    ends = [ids[name] for name in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    config = json.loads((DEMO_FOLDER / "config.json").read_text()) | {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": WIDTH // HEAD,
        "num_key_value_heads": WIDTH // HEAD // 2,
        "head_dim": HEAD,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "max_position_embeddings": 4096,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ends,
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _write_tokenizer(folder: Path, tokens: dict[str, int], specials: dict[str, int], starts: list[str]) -> None:
    tokenizer = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())
    tokenizer["model"] |= {"vocab": tokens, "merges": []}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": id, "content": name, **flags} for name, id in specials.items()]
    bos = {"id": SPECIALS[0], "ids": [specials[SPECIALS[0]]], "tokens": [SPECIALS[0]]}
    tokenizer["post_processor"]["special_tokens"] = {SPECIALS[0]: bos}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    answer = f"{{{{ {json.dumps(starts)}[[n, {len(starts) - 1}] | min] }}}}"
    prompt = f"{{{{ bos_token }}}}{{% if tools %}}{{{{ tools | length }}}}{{% endif %}}{COUNT}{answer}"
    fields = {
        "bos_token": SPECIALS[0],
        "eos_token": "<|eot_id|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": prompt,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
