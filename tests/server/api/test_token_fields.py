"""Token ids in answers, prompts that are cut, usage in every chunk, and chunks for tokens without text."""

from __future__ import annotations

import pytest

from server.api.answers.logprobs import FLOOR
from server.engine import wire
from tests.server.conftest import REPLY
from tests.server.support.echo_engine import sampled_logprob
from tests.server.support.stub_app import StubClient, post_all, state_of
from tests.server.support.tokenizers import BOS, END_HEADER, EOT, START_HEADER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BASE = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hello", "max_tokens": 100}}
REPLY_IDS = [*REPLY.encode(), EOT]
HELLO_IDS = [
    *(BOS, START_HEADER, *b"user", END_HEADER, *b"\n\nhello", EOT),
    *(START_HEADER, *b"assistant", END_HEADER, *b"\n\n"),
]
PROMPT_IDS = {CHAT: HELLO_IDS, COMPLETIONS: [BOS, *b"hello"]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def post(server, path, *, status=200, **fields):
    with server.http() as http:
        response = http.post(path, json=BASE[path] | fields)
        assert response.status_code == status, response.text
        return response.json()


def events(server, path, **fields):
    return server.events(path, BASE[path] | fields)


def texts(chunks):
    return [c["delta"].get("content") if "delta" in c else c["text"] for chunk in chunks for c in chunk["choices"]]


@BOTH
def test_token_ids_of_prompt_and_output(scripted, path):
    answer = post(scripted, path, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == REPLY_IDS
    assert (answer if path == CHAT else choice)["prompt_token_ids"] == PROMPT_IDS[path]
    answer = post(scripted, path, return_token_ids=False)
    (choice,) = answer["choices"]
    assert choice["token_ids"] is (answer if path == CHAT else choice)["prompt_token_ids"] is None


@BOTH
def test_streamed_token_ids_are_those_of_the_whole(scripted, path):
    chunks = events(scripted, path, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [id for choice in choices for id in choice.get("token_ids", ())] == REPLY_IDS
    holders = [holder for holder in [*chunks, *choices] if "prompt_token_ids" in holder]
    assert [holder["prompt_token_ids"] for holder in holders] == [PROMPT_IDS[path]]
    assert "".join(text or "" for text in texts(chunks)) == REPLY


@BOTH
@pytest.mark.parametrize("asked", [{"return_token_ids": True}, {"logprobs": 1}])
def test_the_chunk_with_the_finish_reason_has_what_all_chunks_have(scripted, path, asked):
    if path == CHAT and "logprobs" in asked:
        asked = {"logprobs": True, "top_logprobs": 1}
    *_, last = (choice for chunk in events(scripted, path, **asked) for choice in chunk["choices"])
    assert last["finish_reason"] == "stop"
    assert last["logprobs" if "logprobs" in asked else "token_ids"]


GENERATE = "/inference/v1/generate"
REPLY_SCORES = [sampled_logprob(id) for id in REPLY_IDS]


@BOTH
def test_sampled_logprobs_of_the_whole_and_of_a_stream(scripted, path):
    asked = {"sampled_logprobs": True, "n": 2}
    answer = post(scripted, path, **asked)
    assert [choice["sampled_logprobs"] for choice in answer["choices"]] == [REPLY_SCORES] * 2
    assert {(choice["logprobs"], choice["token_ids"]) for choice in answer["choices"]} == {(None, None)}
    streamed = [choice for chunk in events(scripted, path, **asked) for choice in chunk["choices"]]
    for index in (0, 1):
        own = [choice for choice in streamed if choice["index"] == index]
        assert [score for choice in own for score in choice.get("sampled_logprobs", ())] == REPLY_SCORES
        assert own[-1]["finish_reason"] == "stop" and own[-1]["sampled_logprobs"]
    for plain in (post(scripted, path), post(scripted, path, sampled_logprobs=False)):
        assert "sampled_logprobs" not in plain["choices"][0]


@BOTH
def test_sampled_logprobs_end_with_the_text(scripted, path):
    """As token ids do, where a stop string ends the text before the engine does."""
    asked = {"sampled_logprobs": True, "return_token_ids": True, "stop": "wörld"}
    (whole,) = post(scripted, path, **asked)["choices"]
    assert whole["sampled_logprobs"] == list(map(sampled_logprob, whole["token_ids"]))
    assert len(whole["token_ids"]) < len(REPLY_IDS)
    for chunk in events(scripted, path, **asked):
        for choice in chunk["choices"]:
            assert choice.get("sampled_logprobs", []) == list(map(sampled_logprob, choice.get("token_ids", ())))


@pytest.mark.parametrize("stream", [False, True])
def test_sampled_logprobs_from_ids_to_ids(scripted, stream):
    body = {"token_ids": [BOS, *b"hello"], "sampling_params": {"sampled_logprobs": True}, "stream": stream}
    answers = scripted.events(GENERATE, body) if stream else [scripted.post(GENERATE, body).json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert [id for choice in choices for id in choice.get("token_ids", ())] == REPLY_IDS
    assert [score for choice in choices for score in choice.get("sampled_logprobs", ())] == REPLY_SCORES


def test_a_sampled_logprob_is_finite(echo):
    answer = post(echo, COMPLETIONS, prompt=[0, 1], max_tokens=2, sampled_logprobs=True)
    assert answer["choices"][0]["sampled_logprobs"] == [FLOOR, sampled_logprob(1)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_sampled_logprobs_cannot_be(scripted, path):
    assert post(scripted, path, status=400, sampled_logprobs=2)["error"]["param"] == "sampled_logprobs"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
        (GENERATE, {"token_ids": [BOS]}),  # beside the sampling parameters
    ],
)
def test_routes_that_do_not_tell_sampled_logprobs_refuse_them(scripted, path, body):
    answer = scripted.post(path, {"model": "test-model", **body, "sampled_logprobs": True})
    assert answer.status_code == 400
    assert "sampled_logprobs" in answer.json()["error"]["message"]


@BOTH
def test_counts_of_drafts_are_in_the_usage_of_who_asks(scripted, path):
    answer = post(scripted, path, return_draft_counts=True)
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}  # this engine has no drafts
    assert answer["usage"]["completion_tokens_details"] == none
    assert "completion_tokens_details" not in post(scripted, path)["usage"]
    *_, last = events(scripted, path, return_draft_counts=True, **USAGE)
    assert last["usage"]["completion_tokens_details"] == none


def test_token_ids_of_several_prompts(scripted):
    answer = post(scripted, COMPLETIONS, prompt=[[97, 98], [99]], n=2, max_tokens=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97, 98]] * 2 + [[99]] * 2
    assert [choice["token_ids"] for choice in answer["choices"]] == [REPLY_IDS[:1]] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_named_by_their_ids_in_log_probabilities(scripted, stream):
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 2, "stream": stream}
    names = [f"token_id:{id}" for id in REPLY_IDS[:2]]
    get = (lambda path, **more: events(scripted, path, **more)) if stream else None
    chat = fields | {"logprobs": True, "top_logprobs": 1}
    answers = get(CHAT, **chat) if get else [post(scripted, CHAT, **chat)]
    entries = [e for a in answers for c in a["choices"] for e in (c["logprobs"] or {}).get("content", ())]
    assert [entry["token"] for entry in entries] == names
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == names
    completion = fields | {"logprobs": 1}
    answers = get(COMPLETIONS, **completion) if get else [post(scripted, COMPLETIONS, **completion)]
    parts = [c["logprobs"] for a in answers for c in a["choices"] if c["logprobs"]]
    assert [name for part in parts for name in part["tokens"]] == names
    assert [name for part in parts for top in part["top_logprobs"] for name in top] == names


def test_a_server_may_name_tokens_by_their_ids():
    output = wire.Output("", [97], "length", logprobs=[wire.Logprobs.packed(-0.5, [97], [-0.5], 1)])
    state = state_of(StubClient(output), return_tokens_as_token_ids=True)
    bodies = [{"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": asked} for asked in (None, False)]
    tokens = [answer.json()["choices"][0]["logprobs"]["tokens"] for answer in post_all(state, COMPLETIONS, bodies)]
    assert tokens == [["token_id:97"], ["a"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["logprob_token_ids", "token_ids_logprob"])
def test_the_tokens_that_are_asked_for_are_told_with_each_token(scripted, stream, name):
    """In the scripted engine, an id has minus itself, and the drawn token -0.5."""
    asked = {name: [7, 3, 7], "max_tokens": 2, "return_tokens_as_token_ids": True, "stream": stream}

    def told(path: str, **more: object) -> list:
        get = events if stream else lambda *args, **fields: [post(*args, **fields)]
        choices = [choice for answer in get(scripted, path, **asked, **more) for choice in answer["choices"]]
        name = "logprobs_by_id" if "return_logprobs_by_id" in more else "logprobs"
        return [choice[name] for choice in choices if choice.get(name)]

    entries = [entry for part in told(CHAT) for entry in part["content"]]
    assert [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries] == [
        [("token_id:7", -7.0), ("token_id:3", -3.0)]
    ] * 2
    tops = [top for part in told(COMPLETIONS, logprobs=3) for top in part["top_logprobs"]]
    assert tops == [{f"token_id:{id}": -0.5, "token_id:7": -7.0, "token_id:3": -3.0} for id in REPLY_IDS[:2]]
    places = [place for part in told(CHAT, return_logprobs_by_id=True) for place in part]
    assert [{id: own["rank"] for id, own in place.items()} for place in places] == [
        {str(id): 1, "7": None, "3": None} for id in REPLY_IDS[:2]
    ]


def test_the_tokens_that_are_asked_for_from_ids_to_ids(scripted):
    body = {"token_ids": [1, 2], "sampling_params": {"logprob_token_ids": [7, 3], "max_tokens": 1}}
    (entry,) = scripted.post(GENERATE, body).json()["choices"][0]["logprobs"]["content"]
    told = [(top["token_id"], top["logprob"], top["rank"]) for top in entry["top_logprobs"]]
    assert told == [(REPLY_IDS[0], -0.5, 1), (7, -7.0, None), (3, -3.0, None)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((CHAT, {"logprob_token_ids": ids}, "logprob_token_ids") for ids in ([0] * 129, [-1], [10**6])),
        *((COMPLETIONS, {"logprob_token_ids": ids}, "logprob_token_ids") for ids in ([0] * 129, [-1], [10**6])),
        (COMPLETIONS, {"logprob_token_ids": [1, 2, 3], "logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"logprob_token_ids": [1], "echo": True}, "logprob_token_ids"),
        (CHAT, {"logprob_token_ids": [1, 2, 3], "logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_told(scripted, path, fields, param):
    assert param in post(scripted, path, status=400, **fields)["error"]["message"]


@BOTH
@pytest.mark.parametrize("kept", [1, 4, 1000])
def test_a_prompt_is_cut_to_its_last_tokens(scripted, path, kept):
    answer = post(scripted, path, truncate_prompt_tokens=kept, return_token_ids=True, max_tokens=1)
    holder = answer if path == CHAT else answer["choices"][0]
    assert holder["prompt_token_ids"] == PROMPT_IDS[path][-kept:]
    assert answer["usage"]["prompt_tokens"] == min(kept, len(PROMPT_IDS[path]))


@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_on_the_side_that_is_named(scripted, path, side):
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side}
    answer = post(scripted, path, **fields, return_token_ids=True, max_tokens=1)
    holder = answer if path == CHAT else answer["choices"][0]
    assert holder["prompt_token_ids"] == (PROMPT_IDS[path][-4:] if side == "left" else PROMPT_IDS[path][:4])
    assert post(scripted, path, status=400, truncation_side="top")["error"]["param"] == "truncation_side"


def test_a_prompt_is_cut_to_what_fits(echo):
    ids = [65 + i % 26 for i in range(5000)]
    answer = post(echo, COMPLETIONS, prompt=ids, truncate_prompt_tokens=-1, max_tokens=96, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-4000:]
    assert post(echo, COMPLETIONS, status=400, prompt=ids, max_tokens=96)["error"]["param"] == "input_tokens"


def test_echo_shows_what_is_left_of_a_cut_prompt(scripted):
    answer = post(scripted, COMPLETIONS, truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "loH"


@BOTH
@pytest.mark.parametrize("kept", [0, -2, 4097])
def test_a_cut_that_cannot_be(echo, path, kept):
    assert post(echo, path, status=400, truncate_prompt_tokens=kept)["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_echo_puts_the_text_that_is_continued_before_its_continuation(scripted, stream):
    messages = [*HELLO, {"role": "assistant", "content": "So: "}]
    fields = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 1}
    if stream:
        assert texts(events(scripted, CHAT, **fields)) == ["", "So: ", "H", None]
    else:
        assert post(scripted, CHAT, **fields)["choices"][0]["message"]["content"] == "So: H"


def test_chat_echo_repeats_no_user(scripted):
    assert post(scripted, CHAT, echo=True, max_tokens=1)["choices"][0]["message"]["content"] == "H"


def test_a_chat_with_the_tokenizers_own_tokens_around_it(scripted):
    answer = post(scripted, CHAT, add_special_tokens=True, return_token_ids=True, max_tokens=1)
    assert answer["prompt_token_ids"] == [BOS, *HELLO_IDS]


@BOTH
@pytest.mark.parametrize("more", [{}, {"stop": "text and more"}, {"n": 2}, {"ignore_eos": True, "max_tokens": 60}])
def test_usage_grows_with_every_chunk(scripted, path, more):
    *chunks, last = events(scripted, path, **USAGE, **more)
    for index in range(more.get("n", 1)):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert counts == sorted(set(counts))
        assert path == COMPLETIONS or counts[0] == 0  # with the role
        assert counts[-1] == more.get("max_tokens", len(REPLY_IDS))
        assert own[-1]["choices"][0]["finish_reason"] is not None
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in own[:-1])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(
        max(c["usage"]["completion_tokens"] for c in chunks if c["choices"][0]["index"] == i)
        for i in range(more.get("n", 1))
    )


@BOTH
def test_tokens_without_text_move_the_stream_where_eos_is_ignored(slow, path):
    """A load generator counts chunks: one whose text is held back, here for a stop string, is one too."""
    fields = {"ignore_eos": True, "max_tokens": 12, "stop": "abcdefghijabcdefghij"}
    chunks = events(slow, path, **fields)
    assert len(texts(chunks)) >= 12
    assert "".join(text or "" for text in texts(chunks)) == "abcdefghijab"
    assert len(texts(events(slow, path, **(fields | {"ignore_eos": False})))) <= 4


def test_token_strings_are_the_vocabularys(echo):
    with echo.http() as http:
        answer = http.post("/tokenize", json={"prompt": "a é", "return_token_strs": True}).json()
        assert answer["token_strs"] == ["<|begin_of_text|>", "a", "Ġ", "Ã", "©"]
        chat = {"messages": HELLO, "add_special_tokens": True}
        assert http.post("/tokenize", json=chat).json()["tokens"] == [BOS, *HELLO_IDS]
