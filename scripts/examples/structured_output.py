"""Answers that match a JSON schema, and a pattern: `python -m scripts.examples.structured_output [BASE_URL]`."""

import json
import sys

from openai import OpenAI

SUM = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["text", "answer"],
    "additionalProperties": False,
}

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
question = [{"role": "user", "content": "What is 47 + 35? Answer in JSON."}]
answer = client.chat.completions.create(
    model="demo",
    messages=question,
    temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}},
)
print(json.loads(answer.choices[0].message.content)["answer"])
answer = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "Which is larger, 31 or 57?"}],
    extra_body={"structured_outputs": {"regex": "[0-9]{2}"}},
)
print(answer.choices[0].message.content)
