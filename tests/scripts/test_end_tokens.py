"""The tokens that end an answer, of folders and of the GGUF files with the same tokenizer."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER, resolve
from scripts.building.weights import find_end_tokens, listed
from scripts.llm import LLM, RefusedError
from server.text.tiktoken_model import special_tokens
from tests.conftest import COMPILED
from tests.model import gguf_files
from tests.model.gguf_files import Type

TEXT, MESSAGE, TURN, PADDING = 1521, 1528, 1529, 1524  # of the demo
LIMITS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 64, "num_pages": 8}
HEADER = 1526  # <|start_header_id|>


def fine_tune(folder: Path, *, config: object, eos: str | None, generation: object = None, rename: object = ()) -> Path:
    """The demo with these end tokens in its files, and some tokens under other names."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(DEMO_FOLDER / "model.safetensors")
    texts = {
        name: (DEMO_FOLDER / name).read_text() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    }
    for old, new in rename:
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    (folder / "tokenizer.json").write_text(texts["tokenizer.json"])
    (folder / "config.json").write_text(json.dumps(json.loads(texts["config.json"]) | {"eos_token_id": config}))
    settings = {key: value for key, value in json.loads(texts["tokenizer_config.json"]).items() if key != "eos_token"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"eos_token": eos} if eos else {})))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


def said(path: Path, tokenizer: Path | None = None) -> str:
    return listed(find_end_tokens(resolve(str(path)), tokenizer))


NAMELESS = (("<|end_of_text|>", "<|a|>"), ("<|eom_id|>", "<|b|>"), ("<|eot_id|>", "<|c|>"))
CHATML = (("<|eom_id|>", "<|im_end|>"), ("<|eot_id|>", "<|c|>"))


@pytest.mark.parametrize("config", [TEXT, None])
def test_a_fine_tune_of_a_base_model_stops_at_the_eos_token_of_its_tokenizer(tmp_path, config):
    folder = fine_tune(tmp_path / "m", config=config, eos="<|eot_id|>")
    with LLM(str(folder), device="cpu", compile_cache=str(COMPILED), **LIMITS) as llm:
        (answer,) = llm.chat([[{"role": "user", "content": "What is 47 + 35?"}]], {"temperature": 0})
    assert (answer.outputs[0].text, answer.outputs[0].finish_reason) == ("47 + 35 = 82.", "stop")


def test_without_end_tokens_answers_end_by_length_and_grammars_are_refused(tmp_path):
    folder = fine_tune(tmp_path / "m", config=None, eos=None, rename=NAMELESS)
    report: list[str] = []
    with LLM(str(folder), device="cpu", compile_cache=str(COMPILED), report=report.append, **LIMITS) as llm:
        ask = [[{"role": "user", "content": "What is 47 + 35?"}]]
        (answer,) = llm.chat(ask, {"temperature": 0, "max_tokens": 20})
        with pytest.raises(RefusedError, match="this engine serves no grammars"):
            llm.chat(ask, {"response_format": {"type": "json_object"}})
    assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (20, "length")
    assert "  end tokens        none: an answer ends at max_tokens or at a stop string" in report


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # The usual fine-tune of a base model. A file that states nothing leaves it to the tokenizer.
        (
            {"config": TEXT, "eos": "<|eot_id|>"},
            "<|end_of_text|> (config.json), <|eot_id|> (the tokenizer's eos_token), <|eom_id|> (its name)",
        ),
        (
            {"config": None, "eos": "<|eot_id|>"},
            "<|eot_id|> (the tokenizer's eos_token), <|end_of_text|> (its name), <|eom_id|> (its name)",
        ),
        # As published with Llama 3.1: the list of generation_config.json comes before config.json.
        (
            {"config": HEADER, "eos": "<|eot_id|>", "generation": [TEXT, MESSAGE, TURN]},
            "<|end_of_text|> (generation_config.json), <|eom_id|> (generation_config.json), "
            "<|eot_id|> (generation_config.json)",
        ),
        (
            {"config": TEXT, "eos": None, "generation": {}},
            "<|end_of_text|> (config.json), <|eom_id|> (its name), <|eot_id|> (its name)",
        ),
        # Hermes and other fine-tunes with ChatML's turns.
        (
            {"config": TEXT, "eos": "<|im_end|>", "rename": CHATML},
            "<|end_of_text|> (config.json), <|im_end|> (the tokenizer's eos_token)",
        ),
        (
            {"config": TEXT, "eos": "<|end_of_text|>", "rename": CHATML},
            "<|end_of_text|> (config.json), <|im_end|> (its name)",
        ),
        # Tokens of other names.
        ({"config": PADDING, "eos": "<|c|>", "rename": NAMELESS},
         "<|finetune_right_pad_id|> (config.json), <|c|> (the tokenizer's eos_token)"),
        ({"config": 7, "eos": "<|nowhere|>", "rename": NAMELESS}, "7 (config.json)"),
        ({"config": None, "eos": "!", "rename": NAMELESS}, "! (the tokenizer's eos_token)"),
        (
            {"config": None, "eos": None, "rename": NAMELESS},
            "none: an answer ends at max_tokens or at a stop string",
        ),
    ],
)  # fmt: skip
def test_the_start_names_each_end_token_and_its_origin(tmp_path, files, expected):
    generation = files.pop("generation", None)
    folder = fine_tune(tmp_path / "m", **files, generation=generation if generation != {} else None)
    if generation == {}:
        (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert said(folder) == expected


def test_a_gguf_file_has_the_end_tokens_of_its_folder(tmp_path):
    folder = fine_tune(tmp_path / "m", config=TEXT, eos="<|eot_id|>")
    config, tensors = LlamaConfig.from_file(DEMO_FOLDER), load_file(DEMO_FOLDER / "model.safetensors")
    path = gguf_files.write(tmp_path / "m.gguf", config, tensors, Type.BF16, tokenizer=folder)
    assert said(path) == "<|eot_id|> (the file's metadata), <|end_of_text|> (its name), <|eom_id|> (its name)"
    ids = [{token.id for token in find_end_tokens(resolve(str(where)))} for where in (folder, path, DEMO_FOLDER)]
    assert ids == [{TEXT, MESSAGE, TURN}] * 3


def test_the_tokenizer_that_is_served_counts(tmp_path):
    own = fine_tune(tmp_path / "own", config=7, eos="<|a|>", rename=NAMELESS)
    other = fine_tune(tmp_path / "other", config=7, eos="<|begin_of_text|>", rename=NAMELESS)
    assert said(own) == "7 (config.json), <|a|> (the tokenizer's eos_token)"
    assert said(own, other) == "7 (config.json), <|begin_of_text|> (the tokenizer's eos_token)"


def test_an_end_token_that_the_model_does_not_know_is_none(tmp_path):
    folder = fine_tune(tmp_path / "m", config=TEXT, eos="<|new|>", rename=NAMELESS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|new|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<|new|>") == 1536
    assert said(folder) == "<|a|> (config.json)"


def test_metas_tokenizer_model_has_llama_3s_names(tmp_path):
    folder = fine_tune(tmp_path / "m", config=None, eos=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ranks = [base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256)]
    (folder / "tokenizer.model").write_bytes(b"".join(ranks))
    ids = {token: 256 + i for i, token in enumerate(special_tokens())}
    found = {token.text: token.id for token in find_end_tokens(resolve(str(folder)))}
    assert found == {name: ids[name] for name in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")}


def test_a_preset_and_a_model_without_a_tokenizer_have_what_is_stated(tmp_path):
    assert said(Path("preset:llama-3.1-8b")) == "128001 (the preset), 128008 (the preset), 128009 (the preset)"
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copy(DEMO_FOLDER / "config.json", folder)
    assert said(folder) == "1521 (config.json), 1528 (config.json), 1529 (config.json)"
