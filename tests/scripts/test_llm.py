"""Offline generation in Python, over the real server application and engine with the fake runner beneath."""

import threading

import pytest
from tokenizers import Tokenizer

from batcher.errors import EngineDeadError
from batcher.request import Pooling
from scripts.llm import COMPLETIONS, RefusedError
from tests.scripts.generating import foretold

GREEDY = {"temperature": 0, "max_tokens": 12}


def test_results_come_in_order_and_do_not_depend_on_company(make_llm):
    prompts = [f"prompt {i}" for i in range(30)]
    with make_llm() as llm:
        together = llm.generate(prompts, GREEDY)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert llm.stats().num_pages_used == 0
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert len({result.token_ids for result in together}) == 30
    assert {len(result.token_ids) for result in together} == {12}
    assert [result.num_prompt_tokens for result in together] == [1 + len(prompt) for prompt in prompts]


def test_text_and_token_prompts_are_the_same_prompt(make_llm, model_folder):
    ids = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode("abc").ids
    with make_llm() as llm:
        text, tokens = llm.generate(["abc", ids], GREEDY)
    assert text.token_ids == tokens.token_ids
    assert text.text == tokens.text != ""


def test_params_may_differ_by_prompt(make_llm):
    with make_llm() as llm:
        params = [{"max_tokens": 3, "seed": 1}, {"max_tokens": 5, "n": 2, "seed": 1}]
        first, second = llm.generate(["abc", "abc"], params)
    assert len(first.choices) == 1
    assert [len(choice.token_ids) for choice in second.choices] == [5, 5]
    assert second.choices[0].token_ids[:3] == first.token_ids
    assert second.choices[0].token_ids != second.choices[1].token_ids
    assert first.choices[0].finish_reason == "length"


def test_more_work_than_slots_refuses_nobody(make_llm):
    with make_llm() as llm:
        assert len(llm.generate([f"{i}" for i in range(40)], GREEDY | {"n": 1})) == 40
        assert llm.settings.max_queue > 10**6


def test_chat_goes_through_the_template(make_llm):
    with make_llm() as llm:
        (result,) = llm.chat([[{"role": "user", "content": "hi"}]], GREEDY)
        header = "<|start_header_id|>{}<|end_header_id|>\n\n"
        raw = "".join((header.format("user"), "hi<|eot_id|>", header.format("assistant")))
        (same,) = llm.generate([raw], GREEDY)
    assert result.token_ids == same.token_ids


def test_prompts_are_embedded_in_order_next_to_generation(make_llm, model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    texts = [f"text number {i}" for i in range(20)]
    with make_llm(pooling=Pooling.LAST) as llm:
        embedded = llm.embed(texts)
        (ids,) = llm.embed([[9, 8, 7]])
        assert llm.generate(["abc"], GREEDY)[0].token_ids
        with pytest.raises(RefusedError, match="request 1: input"):
            llm.embed(["abc", []])
        assert not llm._client._token_ids  # of requests that have ended
    prompts = [tokenizer.encode(text).ids for text in texts]
    for found, prompt in zip([*embedded, ids], [*prompts, [9, 8, 7]], strict=True):
        assert found.vector.tolist() == pytest.approx(foretold(prompt, Pooling.LAST), abs=1e-6)
        assert found.num_prompt_tokens == len(prompt)


def test_a_refused_request_is_named(make_llm):
    with make_llm() as llm:
        with pytest.raises(RefusedError, match="request 1: max_tokens") as caught:
            llm.generate(["a", "b"], [GREEDY, {"max_tokens": 0}])
        assert caught.value.status == 400
        with pytest.raises(RefusedError, match="maximum context length is 256 tokens"):
            llm.generate(["a" * 300])
        assert len(llm.generate(["a"], GREEDY)) == 1


def test_prompts_and_params_must_fit_together(make_llm):
    with make_llm() as llm:
        with pytest.raises(ValueError, match="not one text"):
            llm.generate("abc")
        with pytest.raises(ValueError, match="one for each"):
            llm.generate(["a", "b"], [{}])
        with pytest.raises(ValueError, match="stream"):
            llm.generate(["a"], {"stream": True})


def test_what_is_given_up_leaves_no_tokens_behind(make_llm):
    go_on = threading.Event()

    def hold(number: int) -> None:
        if number == 5:  # the short request has ended, the long ones have not
            go_on.wait(60)

    def fail(*answer: object) -> None:
        raise RuntimeError("nobody wants the answers")

    with make_llm(on_result=hold) as llm:
        bodies = [{"prompt": "a", "max_tokens": limit} for limit in (1, 200, 200, 200)]
        try:
            with pytest.raises(RuntimeError, match="nobody wants"):
                llm.post_all([(COMPLETIONS, body) for body in bodies], fail)
            assert llm._client._token_ids == {}
        finally:
            go_on.set()


def test_a_dead_engine_is_said_and_not_waited_for(make_llm):
    def stumble(number: int) -> None:
        if number == 3:
            raise RuntimeError("the device has gone")

    with make_llm(on_result=stumble, healthy=False) as llm, pytest.raises(EngineDeadError, match="has died"):
        llm.generate([f"{i}" for i in range(20)], GREEDY)
