"""What settings do under a load, at once and without a simulation: the steady state of continuous batching.

In the steady state every row gets a token in every step, and a step is a decode of all rows, alone or with a chunk of a
prompt. A request takes the time that its chunks add to steps, and its share of the decodes. The rate at which requests
end follows from this, and the rest by Little's law. Latencies are means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scripts.lab.planning.roofline import HOST_ROW_S, HOST_STEP_S
from scripts.lab.planning.sweep import Candidate, Outcome, Simulator
from scripts.lab.planning.workload import Objectives, Workload

DRAWN = 2001  # requests of which the means are taken
MEAN = "mean"
MOST_BUSY = 0.99  # of the time for prompts, in the formula of their queue


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Means of the requests, in tokens."""

    prompt: float
    computed: float  # of the prompt: without the prefix that is cached
    pairs: float  # of attention in a prompt: of a computed token and one before it
    output: float
    context: float  # of a row at any time: long outputs are there for longer

    @classmethod
    def of(cls, workload: Workload, max_model_len: int, *, prefix_caching: bool) -> Mix:
        """The mix of a workload whose requests are cut to the context."""
        drawn = workload.draw(DRAWN, max_model_len)
        prompts, outputs, shared = (
            np.array([getattr(request, name) for request in drawn], float)
            for name in ("num_prompt", "num_output", "num_shared")
        )
        computed = np.maximum(prompts - shared * prefix_caching, 1.0)
        return cls(
            prompt=float(prompts.mean()),
            computed=float(computed.mean()),
            pairs=float((computed * (prompts - computed / 2)).mean()),
            output=float(outputs.mean()),
            context=float(outputs @ (prompts + outputs / 2) / outputs.sum()),
        )


@dataclass(frozen=True, kw_only=True)
class Steady:
    """One replica with so many rows in every step."""

    rows: int
    rate: float  # requests per second
    prompt_s: float  # the steps with a prompt's chunks
    token_s: float  # from a token of a row to its next one


class Replica:
    """One replica of a candidate."""

    def __init__(self, candidate: Candidate, mix: Mix) -> None:
        memory = candidate.memory
        self._line, self._mix = candidate.sizes.roofline, mix
        self._budget, self.max_num_seqs = memory.buckets.max_num_batched_tokens, memory.buckets.max_num_seqs
        self.room = memory.num_pages * memory.page_size  # tokens
        cached = mix.prompt - mix.computed
        rows = max(1, min(self.max_num_seqs, int((self.room - cached) / (mix.context - cached))))
        # Where steps have a chunk each, there are no more rows than requests whose prompts were computed meanwhile.
        self.most_rows = max(1, min(rows, int(mix.output / self._chunks(rows))))

    def _chunks(self, rows: int) -> float:
        """The number of chunks of a prompt."""
        return max(self._mix.computed / max(self._budget - rows, 1), 1.0)

    def steady(self, rows: int) -> Steady:
        """Its state with so many rows."""
        mix, host_s = self._mix, HOST_STEP_S + HOST_ROW_S * rows
        chunks, kv_tokens = self._chunks(rows), rows * mix.context
        chunk = mix.computed / chunks
        pairs = kv_tokens + mix.pairs / chunks
        with_chunk = self._line.seconds(int(rows + chunk), rows + 1, kv_tokens=kv_tokens + mix.prompt, pairs=pairs)
        decode_s = max(self._line.seconds(rows, rows, kv_tokens=kv_tokens, pairs=kv_tokens), host_s)
        prompt_s = chunks * max(with_chunk, host_s)
        rate = 1 / max(prompt_s + (mix.output / rows - chunks) * decode_s, prompt_s)
        return Steady(rows=rows, rate=rate, prompt_s=prompt_s, token_s=rows / (rate * mix.output))

    def fewest(self, most: int, enough: Callable[[Steady], bool]) -> Steady:
        """The state with the fewest rows that is enough, or that with the most."""
        low = 1
        while low < most:
            middle = (low + most) // 2
            if enough(self.steady(middle)):
                most = middle
            else:
                low = middle + 1
        return self.steady(most)


class Estimator(Simulator):
    """Estimates in place of simulating. An estimate has no steps in which prompts give way to targets."""

    simulates = False

    def __init__(self) -> None:
        self._mixes: dict[tuple[int, bool], Mix] = {}

    def _replica(self, candidate: Candidate, workload: Workload) -> tuple[Replica, Mix]:
        max_model_len, caching = candidate.memory.max_model_len, candidate.settings.enable_prefix_caching
        if (mix := self._mixes.get((max_model_len, caching))) is None:
            mix = self._mixes[max_model_len, caching] = Mix.of(workload, max_model_len, prefix_caching=caching)
        return Replica(candidate, mix), mix

    def measure(
        self,
        candidate: Candidate,
        workload: Workload,
        *,
        rate: float | None,
        concurrency: int | None = None,
        objectives: Objectives | None,
    ) -> Outcome:
        """A rate that cannot be served is answered with the highest one, and is not met."""
        replica, mix = self._replica(candidate, workload)
        replicas, most = candidate.num_replicas, replica.most_rows
        keeps_up = True
        if rate is not None:
            each = rate / replicas
            state = replica.fewest(most, lambda state: state.rate >= each)
            keeps_up, served = each <= state.rate, min(each, state.rate)
            busy = min(served * state.prompt_s, MOST_BUSY)
            first_s = state.token_s / 2 + state.prompt_s * (1 + busy / (2 * (1 - busy)))
        else:
            clients = replica.max_num_seqs if concurrency is None else max(1, -(-concurrency // replicas))
            state = replica.fewest(most, lambda state: state.rows + state.rate * state.prompt_s >= clients)
            served = state.rate
            first_s = max(clients / served - mix.output * state.token_s, state.prompt_s)
        times = {"ttft_ms": first_s * 1e3, "tpot_ms": state.token_s * 1e3, "itl_ms": state.token_s * 1e3}
        rows = served * mix.output * state.token_s
        return Outcome(
            candidate=candidate,
            offered_per_s=rate,
            requests_per_s=replicas * served,
            output_tokens_per_s=replicas * served * mix.output,
            total_tokens_per_s=replicas * served * (mix.prompt + mix.output),
            latencies={name: {MEAN: value} for name, value in times.items()},
            num_preemptions=None,
            occupancy=rows / replica.max_num_seqs,
            device_busy=served / state.rate,
            pages_used=min(rows * mix.context / replica.room, 1.0),
            meets=keeps_up and (objectives is None or objectives.met(times)),
            judged=MEAN,
        )
