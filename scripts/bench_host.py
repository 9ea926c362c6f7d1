"""What the host costs per step: scheduling, packing and taking results in, without a device.

    python -m scripts.bench_host [--rows 64 256] [--steps 2000] [--arrivals]

A runner that answers at once replaces the model, so only the batcher's time is measured. Prints microseconds per step,
median and mean (other work on the machine distorts the mean). `--arrivals` replaces every finished request by a new
one, which adds admissions and prompt chunks; without it the rows only decode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import numpy as np

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.request import Request, RequestOutput, SamplingParams
from batcher.step import Bucket, Capacity, StepInput, StepOutput


class InstantRunner:
    """A runner whose steps take no time. Every token is 5."""

    num_compiles = 0

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._outputs: dict[int, StepOutput] = {}
        self.seconds = 0.0

    def capacity(self) -> Capacity:
        return self._capacity

    def warm_up(self, buckets: Iterable[Bucket], report: Callable[[str], None]) -> None:
        for rows in {bucket.num_rows for bucket in buckets}:
            self._outputs[rows] = StepOutput(tokens=np.full((rows, 1), 5, np.int32), finite=np.ones(rows, bool))

    def execute(self, step: StepInput) -> _Handle:
        return _Handle(self._outputs[step.bucket.num_rows])

    def recover(self) -> None:
        raise RuntimeError("nothing ever fails here")


class _Handle:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class Timed:
    """Records the duration of each call of one method of an object."""

    def __init__(self, owner: object, name: str) -> None:
        self.seconds: list[float] = []
        method = getattr(owner, name)

        def timed(*args: object) -> object:
            start = time.perf_counter()
            result = method(*args)
            self.seconds.append(time.perf_counter() - start)
            return result

        setattr(owner, name, timed)


def measure(num_rows: int, num_steps: int, *, arrivals: bool) -> dict[str, tuple[float, float]]:
    """(median, mean) of microseconds per call, of a step and its parts."""
    rng = np.random.default_rng(0)
    max_tokens = 200 if arrivals else num_steps + 1000
    max_model_len = 300 + max_tokens
    capacity = Capacity(
        num_slots=num_rows,
        num_pages=num_rows * -(-max_model_len // 16),
        page_size=16,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        vocab_size=32000,
    )
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=2048, max_num_seqs=num_rows))
    engine = Engine(InstantRunner(capacity), EngineConfig(eos_token_ids=(1, 2, 3), seed=0), ladder)
    engine.warm_up(lambda _line: None)
    count = 0
    delivered: list[RequestOutput] = []

    def submit() -> None:
        nonlocal count
        count += 1
        sampling = SamplingParams(
            max_tokens=int(rng.integers(100, max_tokens)) if arrivals else max_tokens, temperature=0
        )
        prompt = tuple(rng.integers(10, 32000, 200).tolist())
        engine.add_request(Request(request_id=str(count), prompt=prompt, sampling=sampling), delivered.append)

    for _ in range(num_rows):
        submit()
    for _ in range(100):
        engine.step()
    core = engine._core
    parts = {
        "schedule": Timed(core.scheduler, "schedule"),
        "pack": Timed(core._packer, "pack"),
        "complete": Timed(core, "complete"),
        "step": Timed(engine, "step"),
    }
    for _ in range(num_steps):
        delivered.clear()
        engine.step()
        for output in delivered:
            if output.finish_reason is not None:
                submit()
    micros = {name: np.array(part.seconds) * 1e6 for name, part in parts.items()}
    return {name: (float(np.median(values)), float(values.mean())) for name, values in micros.items()}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--arrivals", action="store_true", help="replace finished requests by new ones")
    args = parser.parse_args()
    for rows in args.rows:
        figures = measure(rows, args.steps, arrivals=args.arrivals)
        parts = ", ".join(f"{name} {median:.0f} ({mean:.0f})" for name, (median, mean) in figures.items())
        print(f"{rows} rows, microseconds, median (mean): {parts}")


if __name__ == "__main__":
    main()
