"""The weights of a runner, which change while it serves: they move to the host and back, or are replaced by weights
from a folder or a trainer."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING, Any

import jax

from model.execution.host_copy import DEVICE, HOST, copied
from model.inputs.paths import is_url, place
from model.inputs.words import one_line
from scripts.building.load import Loaded, Loader
from scripts.building.weights import ChosenWeights, check_alike, choose_weights
from server.engine.wire import KV_CACHE, PARTS, WEIGHTS, ChangeWeights, InSharedMemory, WeightsChange

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.execution.runner import ModelRunner
    from model.loading.given_tensors import GivenWeights

Copies = Mapping[int, jax.Array]  # of the runner's weights in the host's memory, by indices in `ModelRunner.weights`


class RunnerSleep:
    """Moves the parts of a runner off the device and back. No step may be in flight during a call, and none may run
    while a part is `missing`."""

    def __init__(self, runner: ModelRunner) -> None:
        self.missing: frozenset[str] = frozenset()  # some of PARTS
        self._runner = runner
        self._held: Copies = {}

    @property
    def has_dropped(self) -> bool:
        """Whether the model's weights were dropped, so that others must be given."""
        return WEIGHTS in self.missing and not self._given <= self._held.keys()

    def copies(self, level: int) -> Copies:
        """Copies weights to the host's memory: all of them at level 1, and at level 2 only those of the draft model.

        Raises ValueError if the host's memory has no room.
        """
        if WEIGHTS in self.missing:
            return self._held if level == 1 else self._of_drafts()
        kept = [place for place in range(len(self._runner.weights)) if level == 1 or place not in self._given]
        try:
            copies = {place: copied(self._runner.weights[place], HOST, shares=True) for place in kept}
            return jax.block_until_ready(copies)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the host's memory has no room for the weights: {one_line(str(error))}") from error

    def sleep(self, copies: Copies) -> None:
        """Frees the device's memory of all parts. Keeps `copies` for `bring`."""
        self._runner.release()
        self._held, self.missing = copies, frozenset(PARTS)

    def bring(self, parts: Collection[str]) -> None:
        """Brings parts back. Weights that were dropped stay missing. The copies are kept until `settle`.

        Raises RuntimeError if the device has no room; nothing has changed then.
        """
        comes = self.missing & set(parts)
        if self.has_dropped:
            comes -= {WEIGHTS}
        if WEIGHTS in comes:
            self._runner.restore([self._held[place] for place in sorted(self._held)], with_state=KV_CACHE in comes)
        elif KV_CACHE in comes:
            self._runner.allocate()
        self.missing -= comes

    def take_away(self, parts: Set[str]) -> None:
        """Undoes a `bring` of these parts."""
        self._runner.release(weights=WEIGHTS in parts, state=KV_CACHE in parts)
        self.missing |= parts

    def settle(self) -> None:
        """Frees the copies, if the weights are on the device."""
        if WEIGHTS not in self.missing:
            self._held = {}

    def took_others(self) -> None:
        """Notes that the model has other weights, which are on the device. Brings the draft model's weights back."""
        for index, copy in self._of_drafts().items():
            self._runner.weights[index] = copied(copy, DEVICE)
        self._held, self.missing = {}, self.missing - {WEIGHTS}

    def took_all(self, *, with_state: bool) -> None:
        """Notes that all weights, and with `with_state` also the state, are new and on the device."""
        self._held, self.missing = {}, frozenset() if with_state else self.missing - {WEIGHTS}

    @property
    def _given(self) -> Set[int]:
        """The indices of the model's weights, which `took_others` need not bring back."""
        return set(self._runner.described.numbers.values())

    def _of_drafts(self) -> Copies:
        return {place: copy for place, copy in self._held.items() if place not in self._given}


class RunnerWeights:
    """The `server.engine.weight_changes.Weights` of a runner, on the chips of this host.

    Args:
        loader: loads weights into the runner. Its plan has the weights of the start, and the server's tokenizer, which
            a reload does not change.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._plan = loader.plan
        self._sleep = RunnerSleep(loader.runner)
        self._arrays: dict[str, Any] = {}  # of an update, by Hugging Face's names
        # of the change that was checked last
        self._command = ChangeWeights(WeightsChange.WAKE_UP)
        self._found = self._plan.weights  # the weights of a reload
        self._given: GivenWeights | None = None  # the weights of an update
        self._before = self.missing
        # of a change that is prepared
        self._copies: Copies = {}
        self._loaded: Loaded | None = None

    @property
    def config(self) -> LlamaConfig:
        return self._plan.weights.config

    @property
    def missing(self) -> Set[str]:
        return self._sleep.missing

    def receive(self, source: InSharedMemory) -> None:
        from model.loading.received_arrays import received

        self._arrays, self._given = self._arrays | received(source), None

    def give(self, given: GivenWeights) -> None:
        """Checks the arrays of an update from a trainer in this process. Raises ValueError if they cannot be used."""
        self._loader.check(given)
        self._given = given

    def forget(self) -> None:
        self._arrays, self._given = {}, None

    def check(self, command: ChangeWeights) -> Mapping[str, str]:
        """Finds the weights of a reload. Raises ValueError if the engine was not made for them."""
        self._command, self._before = command, self.missing
        match command.change:
            case WeightsChange.WAKE_UP if command.parts is None and self._sleep.has_dropped:
                raise ValueError("sleep(level=2) has dropped the weights: give others first, or wake up kv_cache alone")
            case WeightsChange.SLEEP | WeightsChange.WAKE_UP:
                return {}
            case WeightsChange.UPDATE:
                self._given = self._checked_arrays() if self._given is None else self._given
                return {}
        if WEIGHTS in self.missing and not self._sleep.has_dropped:
            raise ValueError("the engine sleeps: wake it up before other weights are loaded")
        self._found = self._find(command.model)
        are_stored = self._loader.kv_ranges(self._found) is not None
        return {"the scales of K/V": "stored" if are_stored else "not stored"}

    def prepare(self) -> None:
        """Copies the weights to the host, brings parts back, or reads other weights in place of the present ones, which
        the host keeps. The arrays of an update stay where they are."""
        sleep, command = self._sleep, self._command
        match command.change:
            case WeightsChange.SLEEP:
                self._copies = sleep.copies(command.level)
            case WeightsChange.WAKE_UP:
                comes = self._before if command.parts is None else self._before & set(command.parts)
                try:
                    sleep.bring(comes)
                except RuntimeError as error:
                    words = f"{' and '.join(sorted(comes))} cannot go back to the device: {one_line(str(error))}"
                    raise ValueError(words) from error
            case WeightsChange.RELOAD:
                sleep.sleep(sleep.copies(1))  # there may be no room for both
                try:
                    self._loaded = self._loader.read(self._found)
                except BaseException as error:
                    # Frames may hold some of the new weights, and so do reference cycles that Flax makes of a module's
                    # state. The device has no room for them in addition to the old ones.
                    traceback.clear_frames(error.__traceback__)
                    gc.collect()
                    self.abandon()
                    raise

    def commit(self) -> None:
        """Frees memory that is no longer needed, or replaces the weights by the arrays of an update."""
        match self._command.change:
            case WeightsChange.SLEEP:
                self._sleep.sleep(self._copies)
            case WeightsChange.WAKE_UP:
                self._sleep.settle()
            case WeightsChange.RELOAD:
                assert self._loaded is not None
                with_state = KV_CACHE not in self._before
                try:
                    self._loader.place(self._loaded, with_state=with_state)
                except BaseException:
                    self.abandon()
                    raise
                self._sleep.took_all(with_state=with_state)
            case WeightsChange.UPDATE:
                given = self._given
                assert given is not None, "the arrays are not checked"
                self.forget()  # the arrays are freed as they are used
                self._loader.update(given)
                self._sleep.took_others()
        self._copies, self._loaded = {}, None

    def _checked_arrays(self) -> GivenWeights:
        """The arrays of an update. Raises ValueError if they are not all weights of this model."""
        if not self._arrays:
            raise ValueError("nothing has been received")
        from model.loading.given_tensors import GivenWeights

        given = GivenWeights(self._arrays, self.config, donate=True)
        self._loader.check(given)
        return given

    def abandon(self) -> None:
        """Undoes `prepare`. Raises RuntimeError if the parts that were on the chips cannot be brought back."""
        match self._command.change:
            case WeightsChange.WAKE_UP:
                self._sleep.take_away(self._before - self.missing)
            case WeightsChange.RELOAD:
                if self._loaded is not None:
                    self._loaded.delete()
                self._sleep.bring(frozenset(PARTS) - self._before)
                self._sleep.settle()
        self._copies, self._loaded = {}, None

    def _find(self, model: str | None) -> ChosenWeights:
        """The weights in a folder or file. Raises ValueError if the engine was not made for them."""
        settings, own = self._plan.settings, self._plan.weights
        if model is not None:
            settings = dataclasses.replace(settings, model=model)
            if not place(model, "model").exists():
                where = "in the bucket" if is_url(model) else "on this machine"
                raise ValueError(f"model {model!r}: there is no such folder or file {where}")
        weights = choose_weights(settings, self._plan.device.platform, self._plan.tokenizer)
        check_alike(weights, own, settings.model)
        if {token.id for token in weights.end_tokens} != {token.id for token in own.end_tokens}:
            raise ValueError(f"model {settings.model!r}: it ends its answers with other tokens")
        return weights
