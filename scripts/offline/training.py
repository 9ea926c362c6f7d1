"""The methods of `LLM` for training loops: they take the model, give new weights, and borrow the device's memory.

model = llm.model()                                  # flax.nnx, float32, the engine's present weights
...                                                  # steps of an optimizer on the model
llm.update_weights(nnx.state(model), names="own")    # the next token is of these weights
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from batcher.engines import AnyEngine
from batcher.errors import EngineDeadError
from scripts.offline.in_process import CLOSED, InProcessEngine, LoopThread
from scripts.offline.worker import NAME, Worker, num_chips
from server.engine.adapters import Adapters
from server.engine.process import BuiltEngine
from server.engine.weight_changes import WeightChanges
from server.engine.wire import (
    PARTS,
    WEIGHTS,
    AnyQuestion,
    ChangeWeights,
    Pause,
    PauseMode,
    Resume,
    UpdateStep,
    UpdateWeights,
    WeightsChange,
)

if TYPE_CHECKING:
    from model.network.llama import Llama
    from scripts.building.runner import Built

Names = Literal["hf", "own", "maxtext", "tunix"]
Requests = Literal["abort", "wait", "keep"]


class EngineForTraining:
    """Changes the weights of an engine in this process. Methods may be called from any thread, and return when the
    engine has done the work."""

    def __init__(
        self, engine: AnyEngine, built: Built, adapters: Adapters | None, thread: LoopThread, worker: type[Worker]
    ) -> None:
        self.engine = engine
        self.runner = built.runner
        self._built = built
        self._thread = thread
        self._weights = built.runner_weights()
        weights = WeightChanges(engine, self._weights)
        served = BuiltEngine(engine=engine, info=built.info, adapters=adapters, weights=weights)
        self._client = InProcessEngine(served, thread.loop)
        self._changing = threading.RLock()
        self._has_others = False  # weights that `update_weights` has given, or has tried to give
        self._loaded: dict[str, np.ndarray] = {}
        self._worker = worker(self.load_weights, self.update_weights, built)
        parallel = SimpleNamespace(tensor_parallel_size=num_chips(built), data_parallel_size=1)
        # The paths by which trainers of vLLM reach the worker and others.
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=self._worker),
            reset_prefix_cache=self.reset_prefix_cache,
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )

    @property
    def weight_version(self) -> str:
        """The name of the present weights: `default` at first, and then the version of the last update."""
        return self._client.weight_version

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self._client.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether a part is not on the device. Requests that were enqueued wait for it."""
        return bool(self._client.missing)

    def model(self, dtype: str = "float32") -> Llama:
        """A copy of the model to train, on one device: a `flax.nnx` module (`model/network/llama.py`). Its weights are
        those of the checkpoint, or the engine's after `update_weights` has given others.

        Give `nnx.state(model)` back to `update_weights` with `names="own"`.

        Args:
            dtype: the dtype of weights and activations, "float32" or "bfloat16".

        Raises:
            ValueError: the dtype has another name, or the engine's weights are quantised or not on the device.
        """
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: float32 or bfloat16, not {dtype!r}")
        weights = self._built.plan.weights
        with self._changing:
            stored = weights.stored
            if not self._has_others and stored is not None and stored.quantization is None and stored.packing is None:
                return stored.load(dtype=dtype)
            if WEIGHTS in self._client.missing:
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
        """Replaces the weights between two steps. All later tokens use the new weights, and cached prefixes are
        forgotten. Drafts and LoRA adapters stay. The engine's programs are not compiled again.

        Args:
            arrays: all arrays of the model, from NumPy or JAX: a mapping by name, a nested mapping, or an `nnx.State`.
                Arrays on devices are converted to the engine's layout there, and do not go through the host.
            names: the kind of names and layouts: Hugging Face's, this project's own (`model`), MaxText's or Tunix's.
            requests: the treatment of running and waiting requests. `abort` ends them with their output so far, `wait`
                lets the running ones finish with the old weights, and `keep` continues them with the new weights.
            donate: whether the engine may delete the arrays after it has read them, which saves the memory of a copy.
            version: the name of the new weights in results; None: the number of the update.

        Raises:
            ValueError: the arrays cannot be used. The message lists all problems, and the old weights stay.
            EngineDeadError: the engine has died.
        """
        from model.loading.given_tensors import GivenWeights

        if requests not in get_args(Requests):
            raise ValueError(f"requests: {', '.join(get_args(Requests))}, not {requests!r}")
        with self._changing:
            self._ask(UpdateWeights(UpdateStep.BEGIN))
            try:
                self._weights.give(GivenWeights(arrays, self._built.plan.weights.config, names=names, donate=donate))
                with self._paused(requests):
                    self._has_others = True
                    self._ask(ChangeWeights(WeightsChange.UPDATE, version=version or ""))
            except BaseException:
                self._ask(UpdateWeights(UpdateStep.ABANDON))
                raise

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Keeps copies of some of the model's arrays, by their Hugging Face names. They replace the engine's weights
        together, before the next request or at `reset_prefix_cache`."""
        import jax.numpy as jnp

        for name, array in weights:
            detached = array.detach() if hasattr(array, "detach") else array  # of torch, without the gradient
            self._loaded[name] = np.array(detached if isinstance(array, np.ndarray) else jnp.from_dlpack(detached))

    def take_loaded(self) -> None:
        """Gives the arrays of `load_weights` to `update_weights`, and raises its errors."""
        loaded, self._loaded = self._loaded, {}
        if loaded:
            self.update_weights(loaded)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empties the prefix cache; with `reset_connector`, also those in the host's memory and in files."""
        self.take_loaded()
        self.engine.reset_prefix_cache(reset_external=reset_connector)
        return True

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the worker, or a function, which gets the worker first. Returns a list with the result,
        because there is one worker.

        Raises:
            NotImplementedError: the worker has no such method. TRL goes on then with the weights that it has given.
        """
        named = None if callable(method) or method.startswith("_") else getattr(self._worker, method, None)
        call = partial(method, self._worker) if callable(method) else named
        if call is None:
            raise NotImplementedError(
                f"collective_rpc({method!r}): the worker has load_weights and update_weights, joins no group of "
                f"processes, and has other methods by LLM({NAME}=...). Or gather each array, and give it to "
                "load_weights([(name, array)]), or all of them to update_weights(arrays)"
            )
        return [call(*args, **(kwargs or {}))]

    def pause(self, mode: Requests = "abort", *, clear_cache: bool = True) -> None:
        """Holds all requests until `resume`. New requests wait.

        Args:
            mode: the treatment of the other requests, like `requests` of `update_weights`.
            clear_cache: whether cached prefixes are forgotten.
        """
        if mode not in get_args(Requests):
            raise ValueError(f"mode: {', '.join(get_args(Requests))}, not {mode!r}")
        with self._changing:
            if mode == "wait" and self.is_sleeping and self.engine.num_live:
                raise ValueError("wait: requests do not end while the engine sleeps: use keep or abort")
            if mode == "abort":
                self._abort_unsent()
            self._ask(Pause(PauseMode(mode), clear_cache))
            if mode == "abort":
                self._end_pending()

    def resume(self) -> None:
        """Lets requests run again."""
        with self._changing:
            self._ask(Resume())

    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory of weights and K/V pages for others. Running requests stop, and continue later.

        Args:
            level: 1 keeps the weights in the host's memory. 2 drops them: `update_weights` must give others.

        Raises:
            ValueError: another level, or the host has no room.
        """
        if level not in (1, 2):
            raise ValueError(f"level: 1 or 2, not {level!r}")
        with self._changing:
            self._ask(ChangeWeights(WeightsChange.SLEEP, level=level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Brings the weights and the K/V pages back to the device.

        Args:
            tags: `["weights"]` or `["kv_cache"]` for one of the two, such as the weights alone while a trainer still
                needs memory; None: both. Weights that were dropped do not come back: give others.

        Raises:
            ValueError: another tag, no room on the device, or weights that were dropped are asked for by no tags.
        """
        unknown = sorted(set(() if tags is None else tags) - set(PARTS))
        if unknown or isinstance(tags, str):
            raise ValueError(f"tags: a list of {' and '.join(PARTS)}, or None, not {tags!r}")
        with self._changing:
            self._ask(ChangeWeights(WeightsChange.WAKE_UP, parts=None if tags is None else tuple(tags)))

    def _abort_unsent(self) -> None:
        """Ends the requests that the engine does not have yet."""

    def _end_pending(self) -> None:
        """Ends all pending requests, including those that were being sent to the engine when it paused."""

    @contextmanager
    def _paused(self, requests: Requests) -> Iterator[None]:
        """A pause for a change of the weights, which itself keeps the requests."""
        if requests == "keep":
            yield
            return
        was_paused = self.is_paused
        self.pause(requests)
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def _ask(self, question: AnyQuestion) -> None:
        """Waits until the engine has made the change. Raises ValueError if it is refused, or EngineDeadError."""
        reply = self._thread.run(self._client.ask(question))
        if reply.error is not None:
            raise (ValueError if reply.status < 500 else EngineDeadError)(reply.error)

    def _check_open(self) -> None:
        if self._thread.is_closed:
            raise RuntimeError(CLOSED)
