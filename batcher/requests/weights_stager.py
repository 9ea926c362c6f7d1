"""Brings the weights of LoRA adapters and of models to the device, while steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from batcher.requests.live_requests import Staged
from batcher.requests.worker import Worker
from batcher.step import Runner, WeightsKind


class WeightsStager:
    """Calls `Runner.stage`. Each kind of weights has a thread of its own, because a model takes longer than an adapter.

    Args:
        clock: gives seconds.
        put: takes each result, or the error that ends a thread.
    """

    def __init__(
        self,
        runner: Runner,
        kinds: Iterable[WeightsKind],
        clock: Callable[[], float],
        put: Callable[[Staged | Exception], object],
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._put = put
        self._workers = {kind: Worker(f"engine-{kind.name.lower()}s", put) for kind in kinds}

    def start(self) -> None:
        """Starts the threads."""
        for worker in self._workers.values():
            worker.start()

    def ask(self, asked: Iterable[tuple[WeightsKind, int]]) -> None:
        """Brings these weights soon."""
        for kind, identity in asked:
            self._workers[kind].do(partial(self._bring, kind, identity))

    def bring(self, kind: WeightsKind, identity: int) -> Staged:
        """Brings weights on the caller's thread. ValueError and OSError are faults of their files and part of the
        result; other errors are raised."""
        began, fault = self._clock(), None
        try:
            self._runner.stage(kind, identity)
        except (ValueError, OSError) as error:
            fault = error
        return Staged(kind, identity, fault, self._clock() - began)

    def close(self) -> None:
        """Ends each thread after the weights that it is bringing."""
        for worker in self._workers.values():
            worker.close()

    def join(self) -> None:
        """Waits until the threads have ended."""
        for worker in self._workers.values():
            worker.join()

    def _bring(self, kind: WeightsKind, identity: int) -> None:
        self._put(self.bring(kind, identity))
