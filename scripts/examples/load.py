"""Many streams at once, and what each client sees: `python -m scripts.examples.load [BASE_URL]`.

`python -m scripts.lab serving` measures more: arrival processes, percentiles, service objectives.
"""

import asyncio
import sys
import time
from statistics import median

from openai import AsyncOpenAI

STREAMS, TOKENS = 16, 64


async def stream(client: AsyncOpenAI, number: int) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    started, first, tokens = time.monotonic(), 0.0, 0
    chunks = await client.completions.create(
        model="demo", prompt=f"Story {number}:", max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for chunk in chunks:
        first = first or time.monotonic() - started
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return first, tokens


async def main() -> None:
    """Prints the medians over all streams, and the tokens of a second."""
    client = AsyncOpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
    started = time.monotonic()
    results = await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))
    seconds, tokens = time.monotonic() - started, sum(tokens for _, tokens in results)
    ttft_ms = median(first for first, _ in results) * 1000
    print(f"{STREAMS} streams, {tokens} tokens: {tokens / seconds:.0f} tokens/s, TTFT {ttft_ms:.0f} ms")


asyncio.run(main())
