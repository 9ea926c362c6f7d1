"""Tool calls in a text: which pieces come out, wherever the text is cut."""

from __future__ import annotations

import json
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.tool_calls.formats import FORMATS
from server.text.tool_calls.literals import LiteralReader
from server.text.tool_calls.parser import MAX_DEPTH
from server.text.tool_calls.pieces import CallDelta, Content, Piece

NAMES = {"f", "g", "get_weather", "a.b-c", "a/b:c"}
JSON, PYTHONIC, HERMES, XLAM = (FORMATS[name] for name in ("llama3_json", "pythonic", "hermes", "xlam"))


def joined(pieces: list[Piece]) -> list[str | tuple[str, str]]:
    """In the order of the text: content, and (name, arguments) of each call."""
    whole: list[str | list[str]] = []
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, Content):
            if whole and isinstance(whole[-1], str):
                whole[-1] += piece.text
            else:
                whole.append(piece.text)
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append([piece.name, piece.arguments])
            whole.append(calls[-1])
        else:
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    return [item if isinstance(item, str) else tuple(item) for item in whole]


def read(kind, text: str | list[str], *, takes: bool = False, cut: bool = False, **options):
    """`takes`: pieces are taken after each part, as a stream does. `cut`: a limit ends the text."""
    parser = kind(NAMES, **options)
    parts = [text] if isinstance(text, str) else text
    pieces = []
    for part in parts:
        parser.push(part)
        pieces += parser.take() if takes else []
    parser.finish(cut=cut)
    pieces += parser.take()
    check_places("".join(parts), pieces)
    found = joined(pieces)
    assert parser.num_calls == sum(is_object(item[1]) for item in found if not isinstance(item, str))
    return found


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check_places(text: str, pieces: list[Piece]) -> None:
    for piece in pieces:
        if isinstance(piece, Content):
            assert text[piece.start : piece.start + len(piece.text)] == piece.text


def pushed(parser, text: str) -> list[Piece]:
    parser.push(text)
    return parser.take()


CALL = '{"name": "f", "parameters": {"a": 1}}'
F1 = ("f", '{"a": 1}')
TABLES = tomllib.loads(Path(__file__).with_name("tool_calls.toml").read_text())
CASES = [
    pytest.param(FORMATS[kind], text, [x if isinstance(x, str) else tuple(x) for x in expected], id=name)
    for kind, cases in TABLES["calls"].items()
    for name, (text, expected) in cases.items()
]
NO_CALLS = [
    pytest.param(FORMATS[kind], text, [text] if text else [], id=repr(text))
    for kind, texts in TABLES["no_calls"].items()
    for text in texts
]


@pytest.mark.parametrize(("kind", "text", "expected"), [*CASES, *NO_CALLS])
def test_a_text_gives_these_pieces_however_it_is_cut_in_two(kind, text, expected):
    for takes in (False, True):
        assert read(kind, text, takes=takes) == expected
        assert read(kind, list(text), takes=takes) == expected
        for cut in range(len(text)):
            assert read(kind, [text[:cut], text[cut:]], takes=takes) == expected


@pytest.mark.parametrize("name", TABLES["broken"])
def test_broken_arguments_are_content_unless_a_part_of_them_is_sent(name):
    format, text, arguments = TABLES["broken"][name]
    kind = FORMATS[format]
    assert read(kind, text) == read(kind, list(text)) == [text]
    assert read(kind, f"Hm. {'[f(a=1)]' if kind is PYTHONIC else CALL} {text}") == ["Hm. ", F1, " " + text]
    assert read(kind, list(text), takes=True) == [("f", arguments)]
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON, CALL),
        (JSON, f"```json\n[{CALL}]\n```"),
        (JSON, '{"parameters": {"a": 1}, "name": "f"}'),
        (PYTHONIC, "[f(a=1)]"),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>"),
        (XLAM, f"[{CALL}]"),
    ],
)
def test_a_call_that_is_cut_leaves_neither_a_call_nor_content(kind, text):
    ends = [at for at in range(len(text) + 1) if read(kind, text[:at], cut=True)]
    assert ends == [*range(ends[0], len(text) + 1)]
    assert ends[0] >= text.index(")" if kind is PYTHONIC else "}")
    assert all(read(kind, text[:at], cut=True) == [F1] for at in ends)
    for at in range(1, len(text)):
        streamed = read(kind, list(text[:at]), takes=True, cut=True)
        assert streamed in ([], [F1]) or F1[1].startswith(streamed[0][1])
        assert read(kind, f"Well. {text[:at]}", cut=True)[0] == "Well. "
    assert read(kind, f"{text}\n{text[: ends[0] - 1]}", cut=True) == [F1]


def test_text_that_is_no_call_is_whole_where_it_is_cut():
    for text in ("plain", "plain ", " ", "a; ", '{"x": [1', "a ` b", "1 < 2"):
        assert read(JSON, text, cut=True) == [text]


def test_a_call_that_comes_in_one_piece_is_one_delta():
    assert pushed(JSON(NAMES), f"Hm. {CALL}") == [Content("Hm. ", 0), CallDelta(0, "f", '{"a": 1}')]
    assert pushed(PYTHONIC(NAMES), "[f(a=1), g()]") == [CallDelta(0, "f", '{"a": 1}'), CallDelta(1, "g", "{}")]


def test_arguments_come_as_they_are_written():
    parser = JSON(NAMES)
    assert pushed(parser, '{"name": "f", "parameters": {"a": "on') == [CallDelta(0, "f", '{"a": "on')]
    assert pushed(parser, "e tw") == [CallDelta(0, None, "e tw")]
    assert pushed(parser, 'o"}}') == [CallDelta(0, None, 'o"}')]
    parser = PYTHONIC(NAMES)
    assert pushed(parser, "[f(a='on") == [CallDelta(0, "f", '{"a": "on')]
    assert pushed(parser, "e') ") == [CallDelta(0, None, 'e"}')]


def test_content_is_not_held_back_longer_than_it_may_be_a_call():
    parser = JSON(NAMES)
    assert pushed(parser, "a {") == [Content("a ", 0)]
    assert pushed(parser, '"name": "Al') == []
    assert pushed(parser, 'ice", ') == [Content('{"name": "Alice", ', 2)]
    assert pushed(parser, '"age": 5}') == [Content('"age": 5}', 20)]


@pytest.mark.parametrize(("kind", "text"), [(JSON, f"{CALL}; {CALL} more"), (PYTHONIC, "[f(a=1), g()] more")])
def test_after_the_most_calls_nothing_counts(kind, text):
    for cut in range(len(text)):
        assert read(kind, [text[:cut], text[cut:]], most_calls=1) == [F1]
    parser = kind(NAMES, most_calls=1)
    fulls = []
    for char in text:
        parser.push(char)
        fulls.append(parser.is_full)
    assert fulls.index(True) == text.index(")" if kind is PYTHONIC else "}}") + (kind is JSON)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
KEYWORDS = st.from_regex(r"[a-z_é][a-z0-9_]{0,5}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(KEYWORDS, VALUES, max_size=3)), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(0, 400), max_size=6)
CONTENT = st.text(st.sampled_from("ab. \né🙂<>|{}[]\"'"), max_size=8)


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(min(at, len(text)) for at in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(CALLS, CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_calls_come_back(calls, cuts, ascii_only, indent):
    written = [json.dumps(arguments, ensure_ascii=ascii_only, indent=indent) for _, arguments in calls]
    text = "; ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}'
        for (name, _), arguments in zip(calls, written, strict=True)
    )  # fmt: skip
    assert read(JSON, cut(text, cuts)) == [(name, it) for (name, _), it in zip(calls, written, strict=True)]


def as_a_model_writes(value: object, draw) -> str:
    """The value's JSON, with control characters and Python's words here and there."""
    match value:
        case None | True | False if draw(st.booleans()):
            return str(value)
        case str() if draw(st.booleans()):
            raw = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{raw}"'
        case str() if draw(st.booleans()):
            return repr(value)
        case list():
            return f"[{', '.join(as_a_model_writes(each, draw) for each in value)}{draw(COMMA) if value else ''}]"
        case dict():
            items = (f"{as_a_model_writes(k, draw)}: {as_a_model_writes(each, draw)}" for k, each in value.items())
            return f"{{{', '.join(items)}{draw(COMMA) if value else ''}}}"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


COMMA = st.sampled_from(["", ", "])
KEYED = st.dictionaries(st.text(max_size=5) | st.none() | st.booleans() | st.integers(), VALUES, max_size=3)


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), KEYED), min_size=1, max_size=3), CUTS, st.data())
@pytest.mark.parametrize("kind", [JSON, HERMES])
def test_calls_that_are_nearly_json_come_back_as_json(kind, calls, cuts, data):
    texts = []
    for name, arguments in calls:
        written = as_a_model_writes(arguments, data.draw)
        if data.draw(st.booleans()):
            written = json.dumps(written)
        key = data.draw(st.sampled_from(["parameters", "arguments"]))
        parts = [f'"name": "{name}"', f'"{key}": {written}']
        texts.append("{" + ", ".join(data.draw(st.permutations(parts))) + "}")
    text = data.draw(st.sampled_from([", ".join(texts), f"[{', '.join(texts)}]", f"```json\n{'; '.join(texts)}\n```"]))
    if kind is HERMES:
        text = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in texts)
    found = read(kind, cut(text, cuts), takes=data.draw(st.booleans()))
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        (name, json.loads(json.dumps(arguments))) for name, arguments in calls
    ]
    assert found == read(kind, text)


@given(CALLS, CUTS)
def test_any_pythonic_calls_come_back_as_json(calls, cuts):
    calls = [(name, {k: v for k, v in arguments.items() if k.isidentifier()}) for name, arguments in calls]
    inner = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
    text = f"[{', '.join(inner)}]"
    found = read(PYTHONIC, cut(text, cuts), takes=True)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert found == read(PYTHONIC, text)


MIXED = st.lists(
    CONTENT
    | st.sampled_from([
        *(CALL, "[f(a='x', b=2)]", "<|python_tag|>", '{"name": "f"', '{"name": "f", "parameters": ', "[f(a=", "```"),
        *('{"name": "f", "parameters": {"a": ', '{"name": "f", "arguments": "{', "[f(a=['x', ", '[g(b={1: "', "1}}"),
        *("<tool_call>", "</tool_call>", "\n", "{'a': ", '"{\\"a\\": 1}"', "}", "\\u00e9", "\\", "1, ", "True"),
    ]),
    max_size=8,
).map("".join)  # fmt: skip


@given(MIXED, CUTS)
@pytest.mark.parametrize("kind", [JSON, PYTHONIC, HERMES, XLAM])
def test_no_cut_changes_what_is_read(kind, text, cuts):
    assert read(kind, cut(text, cuts)) == read(kind, text)
    assert read(kind, cut(text, cuts), cut=True) == read(kind, text, cut=True)


@given(MIXED, CUTS, st.booleans())
@pytest.mark.parametrize("kind", [JSON, PYTHONIC, HERMES, XLAM])
def test_whatever_is_sent_as_arguments_is_a_json_object(kind, text, cuts, takes):
    found = read(kind, cut(text, cuts), takes=takes)
    for item in found + read(kind, cut(text, cuts), cut=True):
        assert isinstance(item, str) or is_object(item[1])
    streamed = read(kind, cut(text, cuts), takes=True, cut=True)
    assert all(isinstance(item, str) or is_object(item[1]) for item in streamed[:-1])  # the last may be half a call


@given(CALLS, st.integers(0, 400), CUTS)
def test_a_stream_that_is_cut_has_the_whole_answers_calls_and_at_most_a_part_of_one_more(calls, end, cuts):
    text = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    every = read(JSON, text)
    whole = read(JSON, text[:end], cut=True)
    assert whole == every[: len(whole)]
    streamed = read(JSON, cut(text[:end], cuts), takes=True, cut=True)
    assert streamed[: len(whole)] == whole
    for name, arguments in streamed[len(whole) :]:
        assert name == every[len(whole)][0]
        assert every[len(whole)][1].startswith(arguments)
    assert len(streamed) <= len(whole) + 1


@given(st.text(st.sampled_from('{}[]",:\\ue0 1tnul-.ab\n'), max_size=30) | VALUES.map(json.dumps), CUTS)
@pytest.mark.parametrize("kind", [JSON, PYTHONIC])
def test_text_without_a_tools_name_is_content_whole(kind, text, cuts):
    text = text.replace("f", "h").replace("g", "h").replace("c", "h")
    assert "".join(read(kind, cut(text, cuts))) == text


@given(
    st.dictionaries(st.text(), VALUES).map(json.dumps)
    | st.text(st.sampled_from('{}[]",:\\ue0 1truenl-.a'), max_size=20)
)
def test_a_strict_reader_judges_as_a_decoder_does(text):
    text = "{" + text.removeprefix("{").rstrip()  # a decoder takes spaces after a literal, whose end a reader has seen
    reader, at, parts = LiteralReader(max_depth=MAX_DEPTH, keeps_json=True, is_strict=True), 0, []
    while at < len(text) and not (reader.done or reader.broken):
        at, part = reader.read(text, at)
        parts.append(part)
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    assert (reader.done and at == len(text)) == valid
    assert not valid or "".join(parts) == text


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        *(
            (JSON, unit)
            for unit in (
                *("{", '{"name":', '{"parameters":{', "<", "<|python_tag|>", "; ", CALL, CALL + "; ", "[", "]"),
                *("`", "```", "```json", "```\n", '{"parameters":"', '{"name": "f", "parameters": {"a": 1, '),
                '{"name": "f", "parameters": {a',
            )
        ),
        (HERMES, "<tool_call>"),
        (HERMES, f"<tool_call>{CALL}</tool_call>"),
        (JSON, '{"name": "f", "parameters": {"a": [1, "\\n", {"b": true}],'),
        *((PYTHONIC, unit) for unit in ("[", "[f(", "[f(a=", "[f(a='", "[f(a=[", "[f(), ", "[f(a=1, b=", "f", "\\x")),
    ],
)
@pytest.mark.parametrize("size", [1, 4000])
def test_the_work_for_a_character_is_bounded(kind, unit, size):
    """Counted in lines of Python that run in the server's files."""
    text = unit * (8000 // len(unit))
    parser = kind(NAMES)
    num_lines = 0

    def count(frame, event, _):
        nonlocal num_lines
        num_lines += event == "line" and "/server/" in frame.f_code.co_filename
        return count

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        for at in range(0, len(text), size):
            parser.push(text[at : at + size])
        parser.finish()
    finally:
        sys.settrace(tracer)
    assert num_lines < 100 * len(text)
