"""Updates of an engine's weights by arrays that a trainer gives, or by a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripts.building.changeable import RunnerWeights
from scripts.building.load import Loader
from server.engine.process import Weights
from server.engine.wire import ChangeWeights, InFolder, WeightsChange, WeightsSource

if TYPE_CHECKING:
    from model.loading.given_tensors import GivenWeights


class RunnerUpdates:
    """`server.engine.weight_changes.Updates` of a runner on the chips of this host.

    A folder comes alone, and is read by a reload in COMMIT. Arrays are kept as they come until COMMIT.
    """

    def __init__(self, loader: Loader, weights: RunnerWeights) -> None:
        self._loader = loader
        self._weights = weights
        self._arrays: dict[str, Any] = {}  # by Hugging Face's names
        self._folder: ChangeWeights | None = None
        self._given: GivenWeights | None = None  # the arrays, checked

    def begin(self) -> None:
        self._weights.check_updatable()

    def receive(self, source: WeightsSource) -> None:
        self._given = None
        if isinstance(source, InFolder):
            self._folder = ChangeWeights(WeightsChange.RELOAD, source.path)
            return
        from model.loading.received_arrays import received

        self._arrays |= received(source)

    def check(self) -> None:
        if self._folder is not None and self._arrays:
            raise ValueError("the weights come from a folder or as arrays, not as both")
        if self._folder is not None:
            self._weights.check(self._folder)
            return
        if not self._arrays:
            raise ValueError("nothing has been received")
        from model.loading.given_tensors import GivenWeights

        given = GivenWeights(self._arrays, self._weights.config, donate=True)
        self._loader.check(given)
        self._given = given

    def commit(self) -> None:
        folder, given = self._folder, self._given
        self.abandon()  # the arrays are freed as they are used
        if folder is not None:
            reload_from(self._weights, folder)
        else:
            assert given is not None, "the arrays are not checked"
            self._loader.update(given)

    def abandon(self) -> None:
        self._arrays, self._folder, self._given = {}, None, None


class FolderUpdates:
    """`server.engine.weight_changes.Updates` of the runners of several hosts, each of which reads its own folder."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._folder: ChangeWeights | None = None

    def begin(self) -> None:
        """There is nothing to do."""

    def receive(self, source: WeightsSource) -> None:
        if not isinstance(source, InFolder):
            raise ValueError("several hosts take weights from a folder only: give the path of one that every host has")
        self._folder = ChangeWeights(WeightsChange.RELOAD, source.path)

    def check(self) -> None:
        """The hosts check the folder in COMMIT, all at once."""
        if self._folder is None:
            raise ValueError("no folder has been received")

    def commit(self) -> None:
        folder, self._folder = self._folder, None
        assert folder is not None, "no folder has been received"
        reload_from(self._weights, folder)

    def abandon(self) -> None:
        self._folder = None


def reload_from(weights: Weights, folder: ChangeWeights) -> None:
    """A whole reload, with no step in flight."""
    weights.check(folder)
    weights.prepare()
    weights.commit()
