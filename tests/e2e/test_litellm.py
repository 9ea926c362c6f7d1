"""LiteLLM on the demo, as users of OpenAI's API and of vLLM call it."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from tests.e2e.clients import Answer, imported_litellm
from tests.server.support.requests import CALCULATOR, PRODUCT

# LiteLLM reads attributes that pydantic no longer wants read from instances
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

SUM = [{"role": "user", "content": "What is 47 + 35?"}]


@pytest.fixture(scope="module")
def litellm() -> ModuleType:
    """The import takes seconds, which processes that run other files save."""
    return imported_litellm()


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(server, request):
    """The provider's name of the demo, and where it is."""
    return {"model": f"{request.param}/demo", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}


def test_text(litellm, options):
    answer = litellm.completion(messages=SUM, temperature=0, **options)
    assert answer.choices[0].message.content == "47 + 35 = 82."
    assert answer.usage.completion_tokens == 12


def test_a_stream(litellm, options):
    usage = {"include_usage": True}
    chunks = list(litellm.completion(messages=SUM, temperature=0, stream=True, stream_options=usage, **options))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == "47 + 35 = 82."
    assert chunks[-1].usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_its_result(litellm, options, stream):
    def ask(messages):
        answer = litellm.completion(messages=messages, tools=[CALCULATOR], temperature=0, stream=stream, **options)
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0]

    called = ask(PRODUCT)
    (call,) = called.message.tool_calls
    assert called.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"expression": "347 * 21"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "7287"}
    assert ask([*PRODUCT, called.message, result]).message.content == "347 * 21 = 7287."


@pytest.mark.parametrize("form", [Answer, {"type": "json_object"}], ids=["class", "json_object"])
def test_structured_output(litellm, options, form):
    answer = litellm.completion(messages=SUM, response_format=form, temperature=0, **options)
    assert Answer.model_validate_json(answer.choices[0].message.content).answer == 82


def test_a_completion(litellm, options):
    answer = litellm.text_completion(prompt="Once upon a time", max_tokens=8, temperature=0, **options)
    assert "there was" in answer.choices[0].text


def test_faults_have_their_own_types(litellm, options):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "one two " * 2000}], **options)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=SUM, **options | {"model": options["model"].replace("demo", "other")})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(messages=SUM, top_p=7, **options)


def test_responses_and_messages(litellm, server):
    answer = litellm.responses(
        model="openai/demo", input=SUM[0]["content"], temperature=0, api_base=f"{server.url}/v1", api_key="none"
    )
    assert answer.output[0].content[0].text == "47 + 35 = 82."
    answer = litellm.completion(
        model="anthropic/demo", messages=SUM, temperature=0, max_tokens=30, api_base=server.url, api_key="none"
    )
    assert answer.choices[0].message.content == "47 + 35 = 82."
