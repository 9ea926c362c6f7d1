"""Two engines on one host, started twice: the second start reads its programs from the compile cache.

Engine 1 has no chip with the number 0, and runs programs that engine 0 has compiled. On v6e, programs that are read for
chips other than 0 are said to halt the chip (https://github.com/jax-ml/jax/issues/38004, with libtpu 0.0.30).
"""

from __future__ import annotations

import tempfile

from scripts.building.replicas import chips_of_this_host
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result
from scripts.lab.chip.text import answers_of, compare, small_server

ENGINES = 2


def run(options: Options, result: Result) -> None:
    """Fills the result. All prompts are sent at once, so both engines answer."""
    if options.device != "cpu" and len(chips_of_this_host(options.device)) < ENGINES:
        result.say(f"Not checked: there is one chip here, and {ENGINES} engines need one each.")
        return
    limits, prompts = small_server(rehearse=options.rehearse)
    with tempfile.TemporaryDirectory() as cache:
        flags = [*limits, "--data-parallel-size", str(ENGINES), "--compile-cache", cache]
        compiled, read = (answers_of(options.device, flags, prompts)[0] for _ in range(2))
    for prompt, expected, found in zip(prompts, compiled, read, strict=True):
        verdict = compare(expected, found)
        result.say(f"- {prompt}: {verdict}")
        if verdict.startswith("WRONG"):
            result.wrong(f"{prompt}: with programs from the compile cache, {verdict}")
