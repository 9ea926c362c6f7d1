"""Offline generation in Python, over the real server application and engine with the fake runner beneath."""

import threading
from array import array

import pytest
from tokenizers import Tokenizer

from batcher.errors import EngineDeadError
from batcher.request import Pooling
from scripts.llm import COMPLETIONS, RefusedError, SamplingParams
from tests.scripts.generating import foretold

GREEDY = {"temperature": 0, "max_tokens": 12}


def test_results_come_in_order_and_do_not_depend_on_company(make_llm):
    prompts = [f"prompt {i}" for i in range(30)]
    with make_llm() as llm:
        together = llm.generate(prompts, GREEDY)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert llm.stats().num_pages_used == 0
    assert [result.outputs[0].token_ids for result in together] == [result.outputs[0].token_ids for result in alone]
    assert len({tuple(result.outputs[0].token_ids) for result in together}) == 30
    assert {len(result.outputs[0].token_ids) for result in together} == {12}
    assert [len(result.prompt_token_ids) for result in together] == [1 + len(prompt) for prompt in prompts]


def ids_of(model_folder, text: str) -> list[int]:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text).ids


def test_every_form_of_a_prompt_is_the_same_prompt(make_llm, model_folder):
    ids = ids_of(model_folder, "abc")
    with make_llm(pooling=Pooling.LAST) as llm:
        (expected,) = llm.generate(["abc"], GREEDY)
        (vector,) = llm.embed(["abc"])
        assert expected.prompt == "abc" and expected.prompt_token_ids == ids and expected.finished
        one_prompt = [
            "abc",
            ids,
            tuple(ids),
            {"prompt": "abc"},
            {"prompt_token_ids": ids},
            {"prompt_token_ids": array("i", ids), "prompt": "words for people", "multi_modal_data": None},
            {"prompt": "abc", "cache_salt": "s"},
        ]
        for prompt in one_prompt:
            for several in (prompt, [prompt], [prompt, "abc"]):
                results = llm.generate(several, GREEDY)
                assert all(result.outputs[0].token_ids == expected.outputs[0].token_ids for result in results)
                assert {result.outputs[0].text for result in results} == {expected.outputs[0].text}
                assert all(result.prompt_token_ids == ids for result in results)
                for embedded in llm.embed(several):
                    assert embedded.outputs.embedding == vector.outputs.embedding and embedded.prompt_token_ids == ids
        assert llm.generate([]) == llm.embed([]) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([{"prompt_tokens": [1]}], "prompt 0: 'prompt_tokens' cannot be served: use 'prompt'"),
        (["a", {"prompt": "a", "multi_modal_data": {"image": 1}}], "prompt 1: 'multi_modal_data' cannot be served"),
        ({"prompt": None}, "prompt 0: a dict holds 'prompt' .* not a value of type NoneType as its prompt"),
        ({"prompt": ["a"]}, "not a value of type list"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids: a value of type str is no prompt"),
        ([[1, "a"]], "prompt 0: a token id is an int, not a value of type str"),
        ([True, False], "a token id is an int, not a value of type bool"),
        ([1.5], "prompt 0: a value of type float is no prompt"),
        ([None], "prompt 0: a value of type NoneType is no prompt"),
        (b"abc", "a value of type bytes is no prompt"),
        ([b"abc"], "prompt 0: a value of type bytes is no prompt"),
        ({1, 2}, "a value of type set is no prompt"),
        (None, "a value of type NoneType is no prompt"),
        (7, "a value of type int is no prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_type(prompts, words, make_llm):
    with make_llm() as llm:
        for ask in (llm.generate, llm.embed):
            with pytest.raises(ValueError, match=words):
                ask(prompts)


def test_sampling_params_have_vllms_names_and_defaults(make_llm):
    with make_llm() as llm:
        chat = [{"role": "user", "content": "hi"}]
        (result,) = llm.generate("abc", SamplingParams(seed=1))
        assert len(result.outputs[0].token_ids) == 16
        (whole,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(whole.outputs[0].token_ids) == 256 - len(whole.prompt_token_ids)
        for prompt, kept in (("abcdefgh", 3), ([5, 6, 7, 8, 9], 3), ("a" * 300, -1)):
            full = {"temperature": 0, "ignore_eos": True, "max_tokens": None, "truncate_prompt_tokens": kept}
            (cut,) = llm.generate(prompt, SamplingParams(**full))
            assert len(cut.outputs[0].token_ids) + len(cut.prompt_token_ids) == 256
            assert len(cut.prompt_token_ids) == (kept if kept > 0 else 255)
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, n=2)
        same = {"temperature": 0, "max_tokens": 4, "n": 2, "prompt_logprobs": 1}
        assert [(r.outputs, r.prompt_logprobs) for r in llm.generate("abc", params)] == [
            (r.outputs, r.prompt_logprobs) for r in llm.generate("abc", same | {"logprobs": 2})
        ]
        (told,) = llm.chat(chat, params)
        assert [told.outputs] == [r.outputs for r in llm.chat([chat], same | {"logprobs": True, "top_logprobs": 2})]
        output = told.outputs[0]
        for token, found in zip(output.token_ids, output.logprobs, strict=True):
            assert [*found] == [token, *sorted({0, 1} - {token})]  # the numpy runner's most likely ones are 0 and 1
            assert (found[0].rank, found[1].rank, found[token].rank) == (1, 2, 1 + token)
            assert found[token].decoded_token == llm.get_tokenizer().decode(token)
        total = sum(found[id].logprob for id, found in zip(output.token_ids, output.logprobs, strict=True))
        assert output.cumulative_logprob == total
        assert [output.index for output in told.outputs] == [0, 1]
        assert told.outputs[0].sampled_logprobs is None
        scored = SamplingParams(seed=1, max_tokens=4, n=2, sampled_logprobs=True)
        for (each,) in (llm.generate("abc", scored), llm.chat(chat, scored)):
            assert [len(output.sampled_logprobs) for output in each.outputs] == [4, 4]
        stops = SamplingParams(temperature=0, max_tokens=50, stop_token_ids=[told.outputs[0].token_ids[2]])
        assert llm.chat(chat, stops)[0].outputs[0].token_ids == told.outputs[0].token_ids[:3]
        with pytest.raises(RefusedError, match="top_p"):
            llm.generate("abc", SamplingParams(top_p=2.0))
        with pytest.raises(RefusedError, match="best_of"):
            llm.generate("abc", SamplingParams(best_of=2))
    with pytest.raises(TypeError, match="max_token'"):
        SamplingParams(max_token=2)


def test_params_may_differ_by_prompt(make_llm):
    with make_llm() as llm:
        params = [{"max_tokens": 3, "seed": 1}, SamplingParams(max_tokens=5, n=2, seed=1)]
        first, second = llm.generate(["abc", "abc"], params)
    assert len(first.outputs) == 1
    assert [len(output.token_ids) for output in second.outputs] == [5, 5]
    assert second.outputs[0].token_ids[:3] == first.outputs[0].token_ids
    assert second.outputs[0].token_ids != second.outputs[1].token_ids
    assert first.outputs[0].finish_reason == "length"


def test_a_stop_string_ends_the_token_ids_also_inside_a_step_of_several(make_llm):
    """The token in which the text ends is the last one."""
    with make_llm() as llm:
        (whole,) = llm.generate("abc", GREEDY)
        stop = llm.get_tokenizer().decode(whole.outputs[0].token_ids[5])
        (cut,) = llm.generate("abc", GREEDY | {"stop": stop})
    assert (
        cut.outputs[0].token_ids
        == whole.outputs[0].token_ids[: whole.outputs[0].token_ids.index(whole.outputs[0].token_ids[5]) + 1]
    )
    assert cut.outputs[0].stop_reason == stop


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
        assert [result.outputs[0].token_ids] == [
            r.outputs[0].token_ids for r in llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        ]
        for messages, words in (
            ("hi", "a value of type str is no conversation"),
            (["hi"], "conversation 0: a value of type str is no list of messages"),
            ([[]], "request 0: messages"),
            ([[{"role": "user", "content": "hi"}], ["hi"]], "request 1: messages.0: Expected `object`, got `str`"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.chat(messages, GREEDY)
        tokenizer = llm.get_tokenizer()
    assert result.outputs[0].token_ids == same.outputs[0].token_ids
    assert result.prompt is None
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert rendered["input_ids"] == result.prompt_token_ids
    assert tokenizer.decode(result.prompt_token_ids).endswith(raw)
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False) == [tokenizer.convert_tokens_to_ids("<|eot_id|>")]


def test_prompts_are_embedded_in_order_next_to_generation(make_llm, model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    texts = [f"text number {i}" for i in range(20)]
    with make_llm(pooling=Pooling.LAST) as llm:
        embedded = llm.embed(texts)
        (ids,) = llm.embed([[9, 8, 7]])
        assert llm.generate(["abc"], GREEDY)[0].outputs[0].token_ids
        with pytest.raises(RefusedError, match="request 1: input"):
            llm.embed(["abc", []])
    prompts = [tokenizer.encode(text).ids for text in texts]
    for found, prompt in zip([*embedded, ids], [*prompts, [9, 8, 7]], strict=True):
        assert found.outputs.embedding == pytest.approx(foretold(prompt, Pooling.LAST), abs=1e-6)
        assert found.prompt_token_ids == prompt and found.request_id.startswith("embd-")


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
        for params, words in (
            ([{}], "one for each"),
            ({"stream": True}, "stream"),
            (5, "a value of type int is no set of parameters"),
            ([{}, "greedy"], "a value of type str is no set of parameters"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.generate(["a", "b"], params)


def test_a_bar_is_shown_to_who_asks_for_one(make_llm, capsys):
    with make_llm() as llm:
        llm.generate(["a", "b"], GREEDY)
        assert capsys.readouterr().err == ""
        llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_closing_again_is_harmless_and_asking_afterwards_is_refused(make_llm):
    with make_llm() as llm:
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("a")


def test_what_is_given_up_is_aborted(make_llm):
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
        finally:
            go_on.set()
        assert len(llm.generate(["a"], GREEDY)) == 1
        assert llm.stats().num_pages_used == 0


def test_a_dead_engine_is_said_and_not_waited_for(make_llm):
    def stumble(number: int) -> None:
        if number == 3:
            raise RuntimeError("the device has gone")

    with make_llm(on_result=stumble, healthy=False) as llm, pytest.raises(EngineDeadError, match="has died"):
        llm.generate([f"{i}" for i in range(20)], GREEDY)
