"""The README's Python is run as it stands there, on the demo."""

from __future__ import annotations

import re
from functools import partial

import pytest

from scripts import llm
from tests.e2e.conftest import LIMITS, ROOT

pytestmark = pytest.mark.e2e

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def example(containing: str) -> str:
    (code,) = [code for code in EXAMPLES if containing in code]
    return code


def test_the_official_client_talks_to_the_server(server, capsys):
    code = example("from openai import OpenAI")
    assert "http://127.0.0.1:8000" in code
    exec(code.replace("http://127.0.0.1:8000", server.url), {})
    assert "82" in capsys.readouterr().out


def test_offline_generation_from_python(settings, built, monkeypatch, capsys):
    # The same shapes as the other tests', so that no program is compiled anew.
    monkeypatch.setattr(llm, "LLM", partial(llm.LLM, device="cpu", compile_cache=settings.compile_cache, **LIMITS))
    exec(example("from scripts.llm import LLM"), {})
    assert "82" in capsys.readouterr().out


def test_every_example_is_run_here():
    assert len(EXAMPLES) == 2
