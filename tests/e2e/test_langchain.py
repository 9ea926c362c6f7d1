"""LangChain's client on the demo: what it makes of tool calls and of structured output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.clients import Answer, calculator, imported

langchain_openai = imported("langchain_openai", package="langchain-openai")
messages = imported("langchain_core.messages", package="langchain-openai")
tools = imported("langchain_core.tools", package="langchain-openai")

pytestmark = [
    pytest.mark.e2e,
    # the official client warns of its own type of a parsed stream, which LangChain prints
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

AS_JSON = "What is 47 + 35? Answer in JSON."
PRODUCT = "What is 347 * 21?"


@tools.tool("calculator", description="Evaluates an expression.")
def evaluate(expression: str) -> str:
    a, times, b = expression.split()
    assert times == "*"
    return str(int(a) * int(b))


def chat_model(server, **options) -> Iterator:
    model = langchain_openai.ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0, **options
    )
    yield model
    model.root_client.close()


@pytest.fixture(scope="module")
def chat(server):
    yield from chat_model(server)


@pytest.fixture(scope="module")
def responses(server):
    yield from chat_model(server, use_responses_api=True)


@pytest.fixture(params=["chat", "responses"])
def model(request):
    """On `/v1/chat/completions` and on `/v1/responses`."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_its_result(model, stream):
    def ask(history):
        if not stream:
            return bound.invoke(history)
        first, *rest = bound.stream(history)
        return sum(rest, first)

    bound = model.bind_tools([evaluate])
    history = [messages.HumanMessage(PRODUCT)]
    called = ask(history)
    (call,) = called.tool_calls
    result = evaluate.invoke(call)
    assert (call["args"], result.content) == ({"expression": "347 * 21"}, "7287")
    assert ask([*history, called, result]).text == "347 * 21 = 7287."


@pytest.mark.parametrize(
    "options",
    [{"tool_choice": "any"}, {"tool_choice": "calculator"}, {"strict": True}, {"parallel_tool_calls": False}],
    ids=str,
)
def test_ways_to_bind_a_tool(model, options):
    (call,) = model.bind_tools([evaluate], **options).invoke(PRODUCT).tool_calls
    assert (call["name"], call["args"]) == ("calculator", {"expression": "347 * 21"})


@pytest.mark.parametrize("form", [Answer, Answer.model_json_schema()], ids=["class", "schema"])
@pytest.mark.parametrize("options", [{"method": "json_mode"}, {"method": "json_schema"}], ids=str)
def test_structured_output(model, form, options):
    structured = model.with_structured_output(form, **options)
    expected = {"text": "47 + 35 = 82.", "answer": 82}
    *_, streamed = structured.stream(AS_JSON)
    for answer in (structured.invoke(AS_JSON), streamed):
        assert (answer if isinstance(answer, dict) else answer.model_dump()) == expected


@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output_by_a_call(model, strict):
    structured = model.with_structured_output(calculator, method="function_calling", strict=strict, include_raw=True)
    answer = structured.invoke(PRODUCT)
    assert answer["parsing_error"] is None
    assert answer["parsed"] == calculator(expression="347 * 21")
