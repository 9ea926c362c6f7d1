from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from server.text.special_tokens import WINDOW, SpecialTokens
from server.text.tokenizer import LONG_TEXT_CHARS, ByteLevelTokenizer
from server.text.tokenizer_files import ChatTemplates
from tests.server.conftest import LLAMA3
from tests.server.support.tokenizers import BOS, EOT, SPECIAL_TOKENS, VOCAB_SIZE, write_folder


def test_a_folder_gives_bytes_special_tokens_and_template_variables(tmp_path):
    tokenizer = ByteLevelTokenizer.from_folder(write_folder(tmp_path, template="T"))
    assert tokenizer.token_bytes[:256] == [bytes([i]) for i in range(256)]
    assert tokenizer.token_bytes[EOT] == b"<|eot_id|>"
    assert list(tokenizer.special_tokens) == list(SPECIAL_TOKENS)
    assert tokenizer.special_ids == frozenset(range(256, 262))
    assert tokenizer.template_variables == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    assert tokenizer.chat_templates == ChatTemplates(default="T")
    assert tokenizer.with_affixes([1, 2]) == [BOS, 1, 2]
    assert tokenizer.with_affixes([BOS, 1]) == [BOS, 1]
    assert tokenizer.with_affixes([]) == [BOS]


def test_the_template_file_wins_over_the_field(tmp_path):
    write_folder(tmp_path, template="field")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ByteLevelTokenizer.from_folder(tmp_path).chat_templates == ChatTemplates(default="file")


NAMED = {"rag": "R", "default": "D", "tool_use": "T"}


@pytest.mark.parametrize("without", [[], ["tool_use"], ["default"], ["default", "rag"]])
@pytest.mark.parametrize("form", ["list", "object", "files"])
def test_of_several_templates_those_of_transformers_are_taken(without, form, tmp_path):
    write_folder(tmp_path, template="X" if form == "files" else None)
    templates = {name: template for name, template in NAMED.items() if name not in without}
    if form == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        for name, template in templates.items():
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (tmp_path / path).write_text(template)
    else:
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": listed if form == "list" else templates})
        )
    wanted = PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def chosen(tools: list[dict] | None) -> str | None:
        try:
            return wanted.get_chat_template(tools=tools)
        except ValueError:  # no default among those with names
            return None

    found = ByteLevelTokenizer.from_folder(tmp_path).chat_templates
    assert (found.default, found.tool_use or found.default) == (chosen(None), chosen([{}]))
    again = {"chat_template": found.for_transformers()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(again))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink(missing_ok=True)
    assert ByteLevelTokenizer.from_folder(tmp_path).chat_templates == found


def test_special_tokens_map_and_token_objects_are_read(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>"}))
    variables = ByteLevelTokenizer.from_folder(tmp_path).template_variables
    assert variables == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def test_half_of_a_surrogate_pair_is_no_template(tmp_path):
    write_folder(tmp_path, template="\ud800")
    with pytest.raises(ValueError, match=r"chat_template=.* holds half of a surrogate pair"):
        ByteLevelTokenizer.from_folder(tmp_path)


def with_ids(folder: Path, tokens: dict[str, int], *, special: bool | None) -> Path:
    """A tokenizer with further tokens, among the ordinary ones (`special` None) or as added ones."""
    write_folder(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    if special is None:
        raw["model"]["vocab"] |= tokens
    else:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        raw["added_tokens"] += [{"id": id, "content": token, **plain} for token, id in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("id", "options"), [(300, {"vocab_size": 300}), (4 * 10**9, {"vocab_size": 300}), (4 * 10**9, {})]
)
def test_an_id_that_the_model_does_not_know_is_refused(id, options, tmp_path):
    """One of four billion is refused where no model is known, too: its table would take 32 GB."""
    with_ids(tmp_path, {"zz": id}, special=None)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: 1 tokens have ids that a model of \d+ .*'zz': {id}"):
        ByteLevelTokenizer.from_folder(tmp_path, **options)


def test_a_token_of_plain_text_after_the_vocabulary_is_refused(tmp_path):
    with_ids(tmp_path, {"zz": VOCAB_SIZE}, special=False)
    with pytest.raises(ValueError, match=r"a model of 262 does not know: .*'zz': 262"):
        ByteLevelTokenizer.from_folder(tmp_path, vocab_size=VOCAB_SIZE)


def test_two_tokens_with_one_id_are_refused(tmp_path):
    """The library gives an added token the next id, whether or not an ordinary one has it: text would be control."""
    with_ids(tmp_path, {"zz": VOCAB_SIZE}, special=None)
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*'zz'.* have the same id"):
        ByteLevelTokenizer.from_folder(tmp_path)


def test_a_padding_token_after_the_vocabulary_is_kept_and_no_text_becomes_it(tmp_path, caplog):
    """As fine-tuning leaves it behind. transformers serves such models, too."""
    with_ids(tmp_path, {"[PAD]": VOCAB_SIZE}, special=True)
    tokenizer = ByteLevelTokenizer.from_folder(tmp_path, vocab_size=VOCAB_SIZE)
    assert len(tokenizer.token_bytes) == VOCAB_SIZE
    assert tokenizer.encode_plain(["[PAD]"]) == [list(b"[PAD]")]
    assert tokenizer.encode_parts(SpecialTokens(tokenizer.special_tokens).split("[PAD]")) == [VOCAB_SIZE]
    assert "'[PAD]': 262" in caplog.text


def test_an_id_that_the_tokenizer_itself_adds_must_be_known(tmp_path):
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = [VOCAB_SIZE]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="adds ids to every text"):
        ByteLevelTokenizer.from_folder(tmp_path, vocab_size=VOCAB_SIZE)


def test_a_token_outside_the_alphabet_of_bytes_stands_for_itself(tmp_path):
    """As the library decodes it."""
    folder = with_ids(tmp_path, {"語é": 300}, special=None)
    assert ByteLevelTokenizer.from_folder(folder).token_bytes[300] == "語é".encode()
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode([300]) == "語é"


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("model", {"dropout": 0.5}, "draws at random"),
        ("post_processor", {"special_tokens": {}}, r"tokenizer\.json"),  # the library panics: it names a token
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_in_words(tmp_path, part, change, words):
    write_folder(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw | {part: raw[part] | change}))
    with pytest.raises(ValueError, match=words):
        ByteLevelTokenizer.from_folder(tmp_path)


def test_plain_text_never_gives_special_ids(tmp_path):
    tokenizer = ByteLevelTokenizer.from_folder(write_folder(tmp_path))
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode_plain([token]) == [list(token.encode())]


def test_a_text_has_the_same_ids_alone_and_in_long_company(tmp_path):
    tokenizer = ByteLevelTokenizer.from_folder(write_folder(tmp_path))
    text = "Grüße, <|eot_id|> 🙂\n"
    (alone,) = tokenizer.encode_plain([text])
    assert tokenizer.encode_plain([text, "a" * LONG_TEXT_CHARS, text])[::2] == [alone, alone] == [[*text.encode()]] * 2


def test_raw_prompts_may_write_special_tokens(tmp_path):
    tokenizer = ByteLevelTokenizer.from_folder(write_folder(tmp_path))
    assert tokenizer.encode_parts(SpecialTokens(tokenizer.special_tokens).split("a<|eot_id|>b")) == [
        ord("a"),
        EOT,
        ord("b"),
    ]


def test_no_tokenizer_is_an_error_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        ByteLevelTokenizer.from_folder(tmp_path)


def test_another_kind_of_tokenizer_is_refused():
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="byte-level"):
        ByteLevelTokenizer(backend, config={}, chat_template=None)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a\x0e\x0a\x05<unk>",
        b"YQ== -1",
        b"YQ== 0\nYg== 4000000000",
        b"YQ== 0\nYg== 0",
        b"YQ== 0\nYQ== 1",
        base64.b64encode(b"a" * 100_000) + b" 0",
    ],
    ids=range(6),
)
def test_a_broken_tiktoken_file_is_refused(raw, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(ValueError, match="tiktoken"):
        ByteLevelTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("text", "pieces"), [("a<b>c", ["a", "<b>", "c"]), ("<b><bb>", ["", "<b>", "", "<bb>", ""])])
def test_the_pattern_takes_the_longest(text, pieces):
    assert [part.text for part in SpecialTokens(["<b>", "<bb>", "<b"]).split(text)] == [p for p in pieces if p]


@pytest.mark.parametrize("shift", range(-6, 2))
def test_special_tokens_are_found_wherever_a_long_text_is_cut_for_the_search(shift):
    text = "a" * (WINDOW + shift) + "<bb><b>" + "<b" * WINDOW
    parts = SpecialTokens(["<b>", "<bb>"]).split(text)
    assert "".join(part.text for part in parts) == text
    assert [part.text for part in parts if part.special] == ["<bb>", "<b>"]


def llama3_texts() -> list[str]:
    """The published inputs; each ends with the separator."""
    texts = (LLAMA3 / "vectors.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    assert texts.pop() == ""
    return texts


def test_llama3_published_vectors(llama3):
    lines = (LLAMA3 / "vectors.out").read_text().splitlines()
    expected = [[int(id) for id in line.split()] for line in lines]
    assert len(expected) >= 46
    assert llama3.encode_plain(llama3_texts()) == expected


def test_llama3_special_ids(llama3):
    named = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
        "<|reserved_special_token_247|>": 128255,
    }
    assert named.items() <= llama3.special_tokens.items()
    assert len(llama3.token_bytes) == 128256
    assert llama3.with_affixes([9906]) == [128000, 9906]


def test_llama3_decodes_what_it_encodes(llama3):
    texts = llama3_texts()
    for text, ids in zip(texts, llama3.encode_plain(texts), strict=True):
        assert b"".join(llama3.token_bytes[id] for id in ids).decode() == text
