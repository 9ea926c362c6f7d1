"""A batch on the demo: its answers are those of single requests, and other requests go before it."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import serve
from tests.server.support.requests import CHAT, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "temperature": 0}
NUM_LONG = 150


def line(custom_id: str, body: dict) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def test_a_batch_says_what_single_requests_say_and_lets_them_pass(engine_flags, tmp_path):
    sums = [f"What is {i} + 35?" for i in range(10)]
    questions = [{"messages": [{"role": "user", "content": text}], "temperature": 0} for text in sums]
    with serve(*engine_flags, "--batch-folder", str(tmp_path / "kept")) as server:
        client = server.client()
        lines = [line(f"long-{i}", LONG | {"max_tokens": 120}) for i in range(NUM_LONG)]
        lines += [line(f"sum-{i}", question) for i, question in enumerate(questions)]
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: server.metrics()["num_requests_waiting"] > 0)  # all rows are taken
        alone = [server.post(CHAT, question).json()["choices"][0]["message"]["content"] for question in questions]
        assert client.batches.retrieve(batch.id).status == "in_progress"  # ten requests went before the rest of it
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", timeout_s=300)
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts.completed == len(lines)
        records = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        answers = {record["custom_id"]: record["response"]["body"]["choices"][0]["message"] for record in records}
        assert [answers[f"sum-{i}"]["content"] for i in range(10)] == alone
        assert len({answers[f"long-{i}"]["content"] for i in range(NUM_LONG)}) == 1
