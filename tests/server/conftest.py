from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from server.text.tiktoken_model import tokenizer_from_tiktoken
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.judged import answers_are_valid, faults_of_answers  # noqa: F401, fixtures
from tests.server.support.openai_schemas import SHARED
from tests.server.support.requests import requests_end_with_their_test  # noqa: F401, a fixture
from tests.server.support.running import server_of

LLAMA3 = SHARED / "data/llama3_tokenizer"


@pytest.fixture(scope="session")
def llama3_backend() -> Tokenizer:
    if not LLAMA3.is_dir():
        pytest.skip("the Llama 3 tokenizer is not in ../shared/data")
    return tokenizer_from_tiktoken(LLAMA3 / "tokenizer.model")


@pytest.fixture(scope="session")
def llama3(llama3_backend: Tokenizer) -> ByteLevelTokenizer:
    copy = Tokenizer.from_str(llama3_backend.to_str())
    return ByteLevelTokenizer(copy, config={"bos_token": "<|begin_of_text|>"}, chat_template=None)


# Says the prompt's own tokens over and over, without end.
echo = server_of(EchoConfig(), scope="session")


REPLY = "Héllo, wörld! 🙂 Stop here. END of text"


# Answers every prompt with REPLY and ends its turn.
scripted = server_of(EchoConfig(reply=tuple(REPLY.encode()), step_s=0.002), scope="session")


# Twenty tokens a second for each request, in a context that lets one run for minutes; at most 250 at a time.
slow = server_of(
    EchoConfig(reply=tuple(b"abcdefghij"), step_s=0.05, max_model_len=20000, max_live=250), scope="session"
)
