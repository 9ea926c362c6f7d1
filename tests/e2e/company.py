"""Texts and log-probabilities of some prompts of the demo: each alone, then all together in too few pages, then each
alone again, over cached pages. `python -m tests.e2e.company FOLDER SETTINGS`, with a folder of programs, and engine
settings in JSON. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from scripts.llm import LLM

PROMPTS = [
    f"Once upon a time, there was a very big garden with {count} old trees. In the garden there lived a little {kind}"
    for count in ("two", "seven")
    for kind in ("boy", "girl", "dog", "cat", "bird", "king", "frog", "bear")
]
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 2}
SHORT = GREEDY | {"min_tokens": 16, "logit_bias": {"1521": 100}}  # longer outputs then come unforeseen
# A prompt takes several steps, and rows are preempted: they do not all fit in the pages.
LIMITS = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 24, "page_size": 16, "num_pages": 24}


def answers(llm: LLM, *, alone: bool) -> list[Any]:
    groups = [[prompt] for prompt in PROMPTS] if alone else [PROMPTS]
    outputs = [result.outputs[0] for group in groups for result in llm.generate(group, GREEDY)]
    return [
        (output.text, [{id: asdict(one) for id, one in place.items()} for place in output.logprobs])
        for output in outputs
    ]


if __name__ == "__main__":
    with LLM(model="demo", device="cpu", compile_cache=sys.argv[1], **LIMITS, **json.loads(sys.argv[2])) as llm:
        found = {}
        llm.generate(PROMPTS * 4, SHORT)
        for name, alone in (("alone", True), ("together", False), ("cached", True)):
            found[name] = answers(llm, alone=alone)
        stats = llm.stats()
        figures = {"preemptions": stats.num_preemptions, "hits": stats.prefix_cache_hits}
        print(json.dumps(found | {"figures": figures}))
