"""A tool that the model calls, and its answer from the result: `python -m scripts.examples.tools [BASE_URL]`."""

import json
import sys

from openai import OpenAI

EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Evaluates an expression.", "parameters": EXPRESSION}

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
options = {"model": "demo", "tools": [{"type": "function", "function": CALCULATOR}], "temperature": 0}
messages = [{"role": "user", "content": "What is 347 * 21?"}]
message = client.chat.completions.create(messages=messages, **options).choices[0].message
messages.append(message)
for call in message.tool_calls:
    a, _, b = json.loads(call.function.arguments)["expression"].split()  # 347 * 21
    print(f"{call.function.name}({call.function.arguments})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(int(a) * int(b))})
print(client.chat.completions.create(messages=messages, **options).choices[0].message.content)
