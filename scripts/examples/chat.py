"""A streamed chat of two turns through the official client: `python -m scripts.examples.chat [BASE_URL]`."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
messages = []
for question in ("What is 47 + 35?", "Which is larger, 31 or 57?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    for chunk in client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True):
        text = chunk.choices[0].delta.content or ""
        answer += text
        print(text, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})
