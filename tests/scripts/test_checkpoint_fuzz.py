"""The small files of a checkpoint, mutated: each is read to values that can be served with, or refused in one line."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batcher.sampling_table import PARAMETERS
from model.config import Llama3Scaling, LlamaConfig
from model.inputs.words import one_line
from model.loading.source import DEMO_FOLDER, resolve
from model.network.rope import inverse_frequencies
from scripts.building.weights import find_end_tokens
from server.settings import GenerationDefaults
from server.text.chat_template import ChatTemplate
from server.text.template_environment import TemplateError
from server.text.tokenizer import ByteLevelTokenizer
from tests.examples import examples

VOCAB_SIZE = 1536
SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")

# What a JSON reader can give where something else was meant. JSON has no NaN, but Python's reader does.
HOSTILE = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, -5, 1, 2, 7, 0.5, -0.0, 1e-400, 1e308, 10**15, 2**31, 2**32 - 1, 4 * 10**9, 2**63]
        + [2**64, 10**400, math.nan, math.inf, -math.inf, "", "x", "hot", "1", "\ud800", "\0", "{{", [], {}]
        + [[[]], [None], [1, "x"], [-5], ["LlamaForCausalLM"], {"a": {}}, {"content": None}, {"content": 5}, [{}]]
        + ["{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "{{ 10 ** (10 ** 10) }}", "llama3", "yarn", "default"]
        + [{"rope_type": "linear", "factor": math.inf}, {"rope_type": [], "factor": 2}, {"type": {}, "rope_theta": 0}]
        + [[{"name": "default", "template": 5}], [{"template": "x"}], ["x"], {"default": "{{ messages }}"}]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as the container and the key or index in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


@st.composite
def mutated(draw: st.DrawFn, original: Any) -> bytes:
    """The bytes of a JSON file: values exchanged, replaced, dropped or wrapped, and sometimes no JSON any more."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        among = places(value)
        if not among:
            break
        container, key = draw(st.sampled_from(among))
        alike = [c[k] for c, k in among if type(c[k]) is type(container[key])]
        if type(container[key]) is int:
            alike += [0, 1535, 1536, 2500, 4 * 10**9]
        match draw(st.sampled_from(["copy", "copy", "replace", "replace", "drop", "wrap"])):
            case "copy":  # of the right type, and in the wrong place
                container[key] = copy.deepcopy(draw(st.sampled_from(alike)))
            case "replace":
                container[key] = copy.deepcopy(draw(HOSTILE))
            case "drop":
                del container[key]
            case "wrap":
                container[key] = [container[key]]
    if draw(st.integers(0, 9)) == 0:
        value = draw(HOSTILE)
    raw = json.dumps(value).encode()
    match draw(st.integers(0, 29)):
        case 0:
            raw = raw[: draw(st.integers(0, len(raw)))]
        case 1:
            at = draw(st.integers(0, len(raw)))
            raw = raw[:at] + draw(st.binary(min_size=1, max_size=4)) + raw[at:]
        case 2:
            raw = b'{"eos_token_id": ' + b"[" * 200_000
        case 3:
            raw = raw.decode().encode("utf-16")
        case 4:
            raw = raw.replace(b"1", b"1" * 5000, 1)
    return raw


def refusal(read: Callable[[], Any]) -> tuple[Any, str | None]:
    """What is read, and the line in which it is refused. Any error but a ValueError fails the test."""
    try:
        return read(), None
    except ValueError as error:
        return None, one_line(str(error))


def original(name: str) -> Any:
    return json.loads((DEMO_FOLDER / name).read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The demo's small files and its tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    for name in (*SMALL, "tokenizer.json"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder


@pytest.fixture
def replaced(folder):
    """Writes a file of the folder; it is put back in the end."""
    written = set()

    def write(name: str, raw: bytes) -> Path:
        written.add(name)
        (folder / name).write_bytes(raw)
        return folder

    yield write
    for name in written:
        if (DEMO_FOLDER / name).exists():
            shutil.copy(DEMO_FOLDER / name, folder)
        else:
            (folder / name).unlink()


def fuzz(number: int) -> Callable[[Any], Any]:
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples(number), suppress_health_check=health)


def check_config(config: LlamaConfig) -> None:
    assert 1 <= config.vocab_size <= 2**24
    assert 1 <= config.max_position_embeddings <= 2**30
    assert 0 < config.rms_norm_eps < 1
    assert all(0 <= id < config.vocab_size for id in config.eos_token_ids)
    assert isinstance(config.tie_word_embeddings, bool)
    if isinstance(config.rope_scaling, Llama3Scaling):
        assert config.rope_scaling.low_freq_factor < config.rope_scaling.high_freq_factor
    if config.head_dim <= 1024:
        angles = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling) * 2.0**30
        assert all(map(math.isfinite, angles.tolist()))


@fuzz(400)
@given(raw=mutated(original("config.json")))
def test_config(raw, replaced):
    folder = replaced("config.json", raw)
    config, message = refusal(lambda: LlamaConfig.from_file(folder))
    if message is None:
        check_config(config)
    else:
        assert str(folder / "config.json") in message


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}


@fuzz(200)
@given(raw=mutated(original("config.json") | {"rope_theta": 5e5, "rope_scaling": ROPE, "rope_parameters": ROPE}))
def test_rotary_scaling(raw, replaced):
    test_config.hypothesis.inner_test(raw, replaced)


@fuzz(200)
@given(raw=mutated(original("generation_config.json") | {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}))
def test_generation_config(raw, replaced):
    folder = replaced("generation_config.json", raw)
    source, message = refusal(lambda: resolve(str(folder)))
    assert message is None or str(folder / "generation_config.json") in message
    if source is not None:
        assert all(0 <= id < source.config.vocab_size for id in source.eos_token_ids)
    defaults, message = refusal(lambda: GenerationDefaults.from_folder(folder))
    assert message is None or str(folder / "generation_config.json") in message
    if defaults is not None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            assert getattr(defaults, name) in PARAMETERS[name].range
        assert isinstance(defaults.top_k, int) and defaults.top_k >= -1


def read_tokenizer(folder: Path) -> tuple[ByteLevelTokenizer, ChatTemplate | None]:
    """As at a server's start."""
    tokenizer = ByteLevelTokenizer.from_folder(folder, vocab_size=VOCAB_SIZE)
    variables = tokenizer.template_variables
    template = None
    if source := tokenizer.chat_templates.default:
        template = ChatTemplate(source, special_tokens=tokenizer.special_tokens, variables=variables)
    return tokenizer, template


def check_tokenizer(tokenizer: ByteLevelTokenizer) -> None:
    assert len(tokenizer.token_bytes) <= VOCAB_SIZE
    assert tokenizer.max_token_chars > 0
    assert all(isinstance(text, str) and text.encode() is not None for text in tokenizer.template_variables.values())
    (ids,) = tokenizer.encode_plain(["What is 47 + 35? <|eot_id|>\n"])
    assert all(0 <= id < VOCAB_SIZE for id in tokenizer.with_affixes(ids))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@fuzz(80)
@given(data=st.data())
def test_token_maps_and_templates(data, name, replaced):
    small = {key: value for key, value in original(name).items() if key != "added_tokens_decoder"}
    folder = replaced(name, data.draw(mutated(small)))
    read, message = refusal(lambda: read_tokenizer(folder))
    if message is not None:
        assert str(folder / name) in message or message.startswith("The chat template ")
        return
    tokenizer, template = read
    check_tokenizer(tokenizer)
    if template is not None:
        try:
            parts = template.render([{"role": "user", "content": "hi <|eot_id|>"}])
        except TemplateError:
            return
        assert all(part.text.encode() is not None for part in parts)


def compact(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """With a handful of the vocabulary, so that a mutation hits what is around it."""
    model = tokenizer["model"]
    few = dict(list(model["vocab"].items())[:300:8])
    merges = [merge for merge in model["merges"] if "".join(merge) in few and all(part in few for part in merge)]
    return tokenizer | {"model": model | {"vocab": few, "merges": merges[:20]}}


@fuzz(150)
@given(raw=mutated(compact(original("tokenizer.json"))))
def test_tokenizer_json(raw, replaced):
    folder = replaced("tokenizer.json", raw)
    ends, message = refusal(lambda: find_end_tokens(resolve(str(folder))))
    assert message is None or str(folder / "tokenizer.json") in message
    assert all(0 <= token.id < VOCAB_SIZE for token in ends or ())
    read, message = refusal(lambda: read_tokenizer(folder))
    if message is None:
        check_tokenizer(read[0])
    else:
        assert str(folder / "tokenizer.json") in message


@fuzz(60)
@given(raw=st.binary(max_size=40) | st.text(alphabet="{}%#-'()[]|. forinsetxndiblock01*", max_size=60).map(str.encode))
def test_template_files(raw, replaced):
    folder = replaced("chat_template.jinja", raw)
    _, message = refusal(lambda: read_tokenizer(folder))
    assert message is None or str(folder) in message or message.startswith("The chat template ")
