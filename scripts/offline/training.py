"""What a training loop does with an LLM: it takes the model, gives new weights, and borrows the device's memory.

    model = llm.model()                                  # flax.nnx, float32, the engine's present weights
    ...                                                  # steps of an optimizer on the model
    llm.update_weights(nnx.state(model), names="own")    # the next token is of these weights

These are methods of `LLM`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Set
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from batcher.change import Change, OnDone, PauseMode
from batcher.engine import Engine
from batcher.errors import EngineDeadError
from model.inputs.words import one_line
from scripts.building.build import Built
from scripts.offline.in_process import InProcessEngineClient

if TYPE_CHECKING:
    from model.execution.host_copy import HostCopy
    from model.execution.runner import ModelRunner
    from model.network.llama import Llama

Names = Literal["hf", "own", "maxtext", "tunix"]
Requests = Literal["abort", "wait", "keep"]
LOOK_S = 1.0  # between looks whether the engine still lives
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # vLLM's names of the parts


class EngineForTraining:
    """The weights of an engine of this process. Its methods may be called from any thread, and each waits until the
    engine has done what it says.

    Args:
        client: hears of new weights.
    """

    def __init__(self, engine: Engine, built: Built, client: InProcessEngineClient) -> None:
        self.engine = engine
        self.runner = built.runner
        self._built = built
        self._client = client
        self._sleep = RunnerSleep(built.runner)
        self._changing = threading.RLock()
        self._num_updates = 0
        self._version = client.weight_version
        self._is_paused = False

    @property
    def weight_version(self) -> str:
        """The name of the present weights: `default` at first, and then that of the last update."""
        return self._version

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self._is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether a part is not on the device. Requests that were enqueued wait for it."""
        return bool(self._sleep.missing)

    def model(self, dtype: str = "float32") -> Llama:
        """The model with arrays of its own, on one device: a `flax.nnx` module (`model/network/llama.py`), to be
        trained. Its weights are those of the checkpoint, or the engine's once others were given by `update_weights`.

        Give `nnx.state(model)` back to `update_weights` with `names="own"`.

        Args:
            dtype: "float32" or "bfloat16", of weights and activations.

        Raises:
            ValueError: the dtype has another name, or the engine's weights are quantised or not on the device.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: float32 or bfloat16, not {dtype!r}")
        weights = self._built.weights
        with self._changing:
            stored = weights.stored
            if not self._num_updates and stored is not None and stored.quantization is None and stored.packing is None:
                return stored.load(dtype=dtype)
            if WEIGHTS in self._sleep.missing:
                raise ValueError("the weights are not on the device: wake_up() first, or update_weights()")
            from model.loading.plain_copy import plain_copy

            return plain_copy(self.runner.model(), weights.config, dtype=dtype)

    def update_weights(
        self,
        arrays: Any,
        *,
        names: Names = "hf",
        requests: Requests = "abort",
        donate: bool = False,
        version: str | None = None,
    ) -> None:
        """Replaces the weights between two steps. No later token is of the old ones, and cached prefixes are forgotten.
        Drafts and LoRA adapters stay. The engine's programs are not compiled again.

        Args:
            arrays: all of the model's, NumPy's or JAX's: a mapping of names, a nested one, or an `nnx.State`. Arrays
                on devices go from there to the engine's layout, and not through the host.
            names: whose the names and layouts are: Hugging Face's, this project's own (`model`), MaxText's or Tunix's.
            requests: what becomes of those that run or wait: `abort` ends them with what they have, `wait` lets those
                that run end with the old weights, and `keep` goes on with the new ones where they are.
            donate: the engine may delete the arrays as it takes them, which saves the memory of a copy.
            version: the new weights' name, which results tell; None: the number of the update.

        Raises:
            ValueError: the arrays cannot be used. The message lists all problems, and the old weights stay.
            EngineDeadError: the engine has died.
        """
        from model.loading.given_tensors import GivenWeights

        if requests not in get_args(Requests):
            raise ValueError(f"requests: {', '.join(get_args(Requests))}, not {requests!r}")
        with self._changing:
            given = GivenWeights(arrays, self._built.weights.config, names=names, donate=donate)
            loader, missing = self._built.loader, self._sleep.missing - {WEIGHTS}
            loader.check(given)
            name = str(self._num_updates + 1) if version is None else version

            def update() -> None:
                loader.update(given)
                self._sleep.took_others()
                self._client.note_weight_version(name)

            with self._paused(requests):
                self._change(update, serves_after=not missing)
            self._num_updates, self._version = self._num_updates + 1, name

    def pause(self, mode: Requests = "abort", *, clear_cache: bool = True) -> None:
        """No request runs from now on until `resume`; those that come wait.

        Args:
            mode: what becomes of the others, as `requests` of `update_weights`.
            clear_cache: cached prefixes are forgotten.
        """
        if mode not in get_args(Requests):
            raise ValueError(f"mode: {', '.join(get_args(Requests))}, not {mode!r}")
        with self._changing:
            if mode == "wait" and self._sleep.missing and self.engine.num_live:
                raise ValueError("wait: requests do not end while the engine sleeps: use keep or abort")
            if mode == "abort":
                self._abort_unsent()
            self._done(partial(self.engine.pause, PauseMode(mode), clear_cache))
            if mode == "abort":
                self._end_pending()
            self._is_paused = True

    def resume(self) -> None:
        """Requests run again."""
        with self._changing:
            self._done(self.engine.resume)
            self._is_paused = False

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory of weights and K/V pages, for others. Running requests stop, and go on later.

        Args:
            level: 1 keeps the weights in the host's memory. 2 drops them: `update_weights` must give others.

        Raises:
            ValueError: another level, or the host has no room.
        """
        if level not in (1, 2):
            raise ValueError(f"level: 1 or 2, not {level!r}")
        with self._changing:
            self._change(partial(self._sleep.sleep, level), serves_after=False)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory back.

        Args:
            tags: `["weights"]` or `["kv_cache"]` for one of the two, such as the weights alone while a trainer still
                needs memory; None: both. Weights that were dropped do not come back: give others.

        Raises:
            ValueError: another tag, no room on the device, or weights that were dropped are asked for by no tags.
        """
        unknown = sorted(set(() if tags is None else tags) - set(TAGS))
        if unknown or isinstance(tags, str):
            raise ValueError(f"tags: a list of {' and '.join(TAGS)}, or None, not {tags!r}")
        with self._changing:
            missing = self._sleep.missing_after(TAGS if tags is None else tags)
            if tags is None and missing:
                raise ValueError("sleep(level=2) has dropped the weights: give others by update_weights() first")
            if missing != self._sleep.missing:
                wake_up = partial(self._sleep.wake_up, TAGS if tags is None else tags)
                self._change(wake_up, serves_after=not missing)

    def _abort_unsent(self) -> None:
        """Ends the requests that the engine has not been given yet."""

    def _end_pending(self) -> None:
        """Ends those, too, that were on their way to the engine when it paused."""

    @contextmanager
    def _paused(self, requests: Requests) -> Iterator[None]:
        """A pause for a change, which by itself keeps the requests."""
        if requests == "keep":
            yield
            return
        was_paused = self._is_paused
        self.pause(requests)
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def _change(self, work: Callable[[], None], *, serves_after: bool) -> None:
        self._done(lambda on_done: self.engine.change(Change(work=work, on_done=on_done, serves_after=serves_after)))

    def _done(self, ask: Callable[[OnDone], None]) -> None:
        """Waits until the engine has done what it is asked for. Raises its error, or EngineDeadError."""
        answer: Future[None] = Future()

        def on_done(error: Exception | None) -> None:
            answer.set_result(None) if error is None else answer.set_exception(error)

        ask(on_done)
        while not wait([answer], LOOK_S).done:
            if self.engine.death is not None:
                raise EngineDeadError(f"the engine has died: {self.engine.death}")
        answer.result()


class RunnerSleep:
    """What of a runner is on the device. No step is in flight during any of the calls, and none may run while a part is
    `missing`.

    An error of a call means that nothing has changed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.missing: frozenset[str] = frozenset()  # some of TAGS
        self._runner = runner
        self._held: dict[int, HostCopy] = {}  # of the runner's weights, by their places in them

    def sleep(self, level: int) -> None:
        """Frees the memory of all parts.

        Args:
            level: 1 keeps the weights in the host's memory. 2 drops them, except those that draft.

        Raises:
            ValueError: the host's memory has no room for the weights.
        """
        from model.execution.host_copy import HostCopy

        if WEIGHTS not in self.missing:
            kept = [place for place in range(len(self._runner.weights)) if level == 1 or place not in self._given]
            try:
                self._held = {place: HostCopy.of(self._runner.weights[place]) for place in kept}
            except MemoryError as error:
                raise ValueError("the host's memory has no room for the weights") from error
        elif level == 2:
            self._held = self._of_drafts()
        self._runner.release()
        self.missing = frozenset(TAGS)

    def missing_after(self, tags: Collection[str]) -> frozenset[str]:
        """What is `missing` after `wake_up(tags)`. Weights that were dropped stay missing until others are given."""
        are_held = self._given <= self._held.keys()
        return self.missing - {tag for tag in tags if tag != WEIGHTS or are_held}

    def wake_up(self, tags: Collection[str]) -> None:
        """Brings parts back. Raises ValueError if the device has no room."""
        missing = self.missing_after(tags)
        comes = self.missing - missing
        try:
            if WEIGHTS in comes:
                self._runner.restore([self._held[place] for place in sorted(self._held)], with_state=KV_CACHE in comes)
            elif KV_CACHE in comes:
                self._runner.allocate()
        except RuntimeError as error:
            words = f"{' and '.join(sorted(comes))} cannot go back to the device: {one_line(str(error))}"
            raise ValueError(words) from error
        if WEIGHTS in comes:
            self._held = {}
        self.missing = missing

    def took_others(self) -> None:
        """The model has other weights, which are on the device. Those that draft come back."""
        for place, copy in self._of_drafts().items():
            self._runner.weights[place] = copy.on_devices()
        self._held, self.missing = {}, self.missing - {WEIGHTS}

    @property
    def _given(self) -> Set[int]:
        """The places of the model's weights, which `took_others` need not bring."""
        return set(self._runner.described.numbers.values())

    def _of_drafts(self) -> dict[int, HostCopy]:
        return {place: copy for place, copy in self._held.items() if place not in self._given}
