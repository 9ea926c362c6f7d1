"""The tokenizer and the chat templates in the metadata of a GGUF file.

The file names its pre-tokenizer instead of describing it. Only Llama 3's is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from model.inputs.gguf import CONTROL, UNUSED, USER_DEFINED, GgufFile
from model.inputs.limits import MAX_TEMPLATE_BYTES
from model.inputs.words import shown
from server.text.tokenizer_files import TOOL_USE, ChatTemplates

# llama.cpp's names of Llama 3's pre-tokenizer. With the first ones a word of the vocabulary is not merged, and BOS
# begins every text unless `add_bos_token` is false. With the others words are merged, and `add_bos_token` must be true.
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
MERGED = ("smaug-bpe", "dbrx")
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """The content of the tokenizer files of a model's folder."""

    backend: Tokenizer
    variables: dict[str, str]  # bos_token, eos_token and so on
    chat_templates: ChatTemplates


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Reads the file's metadata. Raises ValueError if the tokenizer is missing, damaged or not of Llama 3's kind."""
    metadata = GgufFile.read(path).metadata
    try:
        tokens, merges, types = _vocabulary(metadata)
        return GgufTokenizer(
            backend=_backend(tokens, merges, types, metadata),
            variables={
                name: tokens[id] for name, key in _NAMED.items() if (id := _id(metadata, key, tokens)) is not None
            },
            chat_templates=ChatTemplates(
                default=_template(metadata, "tokenizer.chat_template"),
                tool_use=_template(metadata, f"tokenizer.chat_template.{TOOL_USE}"),
            ),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def added_gguf_tokens(path: Path) -> tuple[dict[str, int], tuple[str, int] | None]:
    """The ids of control tokens and user-defined tokens by text, and the `eos_token` with its id. There are none if the
    file has no tokenizer. Raises ValueError if the metadata are damaged."""
    metadata = GgufFile.read(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return {}, None
    try:
        tokens, types = _list(metadata, "tokens", str), _list(metadata, "token_type", int)
        eos = _id(metadata, "eos", tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    typed = enumerate(zip(tokens, types, strict=False))
    added = {token: id for id, (token, type) in typed if type in (CONTROL, USER_DEFINED)}
    return added, None if eos is None else (tokens[eos], eos)


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str]], list[int]]:
    """Tokens by id, merges, and the types of the tokens."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={shown(kind)} is not supported (only 'gpt2', byte-level BPE)")
    if pre not in (*LLAMA_3, *MERGED):
        known = ", ".join(map(repr, (*LLAMA_3, *MERGED)))
        raise ValueError(f"tokenizer.ggml.pre={shown(pre)} is not supported (only {known})")
    tokens = _list(metadata, "tokens", str)
    merges = [_parts(merge) for merge in _list(metadata, "merges", str)]
    types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens holds a token twice")
    return tokens, merges, types


def _list[T](metadata: Mapping[str, Any], name: str, kind: type[T]) -> list[T]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(value, kind) for value in found):
        raise ValueError(f"tokenizer.ggml.{name}={shown(found)} is not a list of type {kind.__name__}")
    return found


def _parts(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ValueError(f"tokenizer.ggml.merges holds {shown(merge)}, which is not two tokens")
    return left, right


def _backend(
    tokens: list[str], merges: list[tuple[str, str]], types: list[int], metadata: Mapping[str, Any]
) -> Tokenizer:
    """The tokenizer that `tokenizer.json` would give. The BPE vocabulary has no control tokens, so no text becomes
    one."""
    added = [id for id, type in enumerate(types) if type in (CONTROL, USER_DEFINED)]
    first = added[0] if added else len(tokens)
    if any(type not in (CONTROL, USER_DEFINED, UNUSED) for type in types[first:]):
        raise ValueError("tokenizer.ggml.tokens has ordinary tokens after control tokens, which is not supported")
    ordinary = {token: id for id, token in enumerate(tokens[:first])}
    missing = {part for merge in merges for part in (*merge, "".join(merge))} - ordinary.keys()
    if missing:
        raise ValueError(f"tokenizer.ggml.merges names tokens that are not there: {shown(sorted(missing))}")
    backend = Tokenizer(models.BPE(vocab=ordinary, merges=merges, ignore_merges=_is_llama_3(metadata)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(tokens[id], special=types[id] == CONTROL, normalized=False) for id in added])
    if any(backend.token_to_id(tokens[id]) != id for id in added):
        raise ValueError("tokenizer.ggml.token_type has unused tokens between control tokens, which is not supported")
    if (affixes := _affixes(metadata, tokens)) is not None:
        backend.post_processor = affixes
    return backend


def _is_llama_3(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("tokenizer.ggml.pre") in LLAMA_3


def _affixes(metadata: Mapping[str, Any], tokens: list[str]) -> processors.TemplateProcessing | None:
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", _is_llama_3(metadata))
    before = _id(metadata, "bos", tokens) if adds_bos else None
    after = _id(metadata, "eos", tokens) if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    around = {tokens[id]: id for id in (before, after) if id is not None}
    if not around:
        return None
    template = [f"{tokens[before]}:0"] if before is not None else []
    template += ["$A:0"]
    template += [f"{tokens[after]}:0"] if after is not None else []
    return processors.TemplateProcessing(single=template, special_tokens=list(around.items()))


def _id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    id = metadata.get(key)
    if id is None:
        return None
    if not isinstance(id, int) or not 0 <= id < len(tokens):
        raise ValueError(f"{key}={shown(id)} is not the id of a token")
    return id


def _template(metadata: Mapping[str, Any], key: str) -> str | None:
    template = metadata.get(key)
    if template is None:
        return None
    if not isinstance(template, str) or len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{key} is not a text of at most {MAX_TEMPLATE_BYTES} bytes")
    return template
