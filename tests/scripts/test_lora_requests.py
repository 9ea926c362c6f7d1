"""LoRA adapters in Python: vLLM's `LoRARequest`, and names in the bodies of a batch."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.llm import CHAT, LoRARequest, RefusedError
from tests.server.support.adapters import TEXT, FakeStore, num_reads, write_adapter
from tests.server.support.tokenizers import EOT

PARAMS = {"max_tokens": 50}


def said(results: list) -> list[bytes]:
    """The tokens of the answers, whose ids are those of the text's bytes."""
    assert all(result.outputs[0].token_ids[-1] == EOT for result in results)
    return [bytes(result.outputs[0].token_ids[:-1]) for result in results]


def test_prompts_name_their_adapters(make_llm, tmp_path):
    one, two = (write_adapter(tmp_path / name, name) for name in ("one", "two"))
    first, second = LoRARequest("a", 1, str(one)), LoRARequest("b", 2, str(two))
    with make_llm(store=FakeStore()) as llm:
        assert said(llm.generate(["x", "y"], PARAMS)) == [b"\1\2"] * 2
        assert said(llm.generate(["x", "y"], PARAMS, lora_request=first)) == [b"one"] * 2
        assert said(llm.generate(["x", "y", "z"], PARAMS, lora_request=[second, None, first])) == [
            b"two",
            b"\1\2",
            b"one",
        ]
        chat = [{"role": "user", "content": "x"}]
        assert said(llm.chat(chat, PARAMS, lora_request=second)) == [b"two"]
        assert (num_reads(one), num_reads(two)) == (1, 1)
        answers = []
        llm.post_all([(CHAT, {"model": "b", "messages": chat}), (CHAT, {"model": "c", "messages": chat})],
                     lambda index, status, answer: answers.append((index, status, answer.get("model"))))  # fmt: skip
        assert sorted(answers) == [(0, 200, "b"), (1, 404, None)]


def test_a_name_with_another_path_has_the_weights_of_that_path(make_llm, tmp_path):
    one, two = (write_adapter(tmp_path / name, name) for name in ("one", "two"))
    with make_llm(store=FakeStore()) as llm:
        assert said(llm.generate("x", PARAMS, lora_request=LoRARequest("a", 1, str(one)))) == [b"one"]
        assert said(llm.generate("x", PARAMS, lora_request=LoRARequest("a", 1, str(two)))) == [b"two"]
        write_adapter(two, "new")
        assert said(llm.generate("x", PARAMS, lora_request=LoRARequest("a", 1, str(two)))) == [b"two"]
        again = LoRARequest("a", 1, str(two), load_inplace=True)
        assert said(llm.generate("x", PARAMS, lora_request=again)) == [b"new"]


def test_what_names_no_adapter_is_refused(make_llm, tmp_path):
    one = str(write_adapter(tmp_path / "one", "one"))
    with make_llm(store=FakeStore()) as llm:
        for request, words in (
            ("a", "a value of type str names no adapter"),
            ([LoRARequest("a", 1, one)], "2 prompts, 1 of them"),
            ([LoRARequest("a", 1, one), LoRARequest("a", 1, "/b")], "'a' has two paths"),
            (LoRARequest("m", 1, one), "'m' is the name of the model"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.generate(["x", "y"], lora_request=request)
        with pytest.raises(RefusedError, match="is no folder") as missing:
            llm.generate("x", lora_request=LoRARequest("a", 1, "/no/such/folder"))
        assert missing.value.status == 404
    with make_llm() as llm, pytest.raises(RefusedError, match="enable_lora=True"):
        llm.generate("x", lora_request=LoRARequest("a", 1, one))


def test_a_load_that_is_under_way_at_the_end_is_refused(make_llm, tmp_path):
    slow = write_adapter(tmp_path / "slow", None)
    os.mkfifo(slow / TEXT)
    with ThreadPoolExecutor(2) as threads:
        with make_llm(store=FakeStore()) as llm:
            asked = [
                threads.submit(llm.generate, "x", PARAMS, lora_request=LoRARequest(name, 1, str(slow)))
                for name in ("first", "second")
            ]
            while not num_reads(slow):
                pass
        for answer in asked:
            with pytest.raises((RefusedError, RuntimeError), match="closed"):
                answer.result(timeout=60)
        (slow / TEXT).write_text("read in vain")
