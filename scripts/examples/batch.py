"""A batch file, generated without a server: `python -m scripts.examples.batch`, in the checkout.

An input line is a request of OpenAI's batch API, or a plain prompt. The output has one line for each input line.
"""

import json
import sys
import tempfile
from pathlib import Path

from scripts.generate import main

QUESTION = {"messages": [{"role": "user", "content": "What is 47 + 35?"}]}
LINES = [
    {"custom_id": "sum", "method": "POST", "url": "/v1/chat/completions", "body": QUESTION},
    {"prompt": "Once upon a time", "max_tokens": 20},
]

with tempfile.TemporaryDirectory() as folder:
    prompts, answers = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    code = main(["--model", "demo", "--input", str(prompts), "--output", str(answers), *sys.argv[1:]])
    if not code:
        print(answers.read_text(), end="")
sys.exit(code)
