"""The LoRA adapters of a running engine, in the host's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from model.config import LlamaConfig
from model.inputs.paths import Place
from model.loading.adapter import read_adapter
from model.loading.source import adapter_place
from model.network.lora import LoraWeights


class AdapterStore:
    """Keeps the weights of loaded adapters by their identities. Beyond `max_cpu`, the least recently used ones are
    dropped, and read again when they are asked for. Any thread may call it; `load` and `weights` may read files.

    Args:
        config: of the model.
        max_rank: `--max-lora-rank`.
        max_cpu: `--max-cpu-loras`.
    """

    def __init__(self, config: LlamaConfig, *, max_rank: int, max_cpu: int):
        if max_rank < 1 or max_cpu < 1:
            raise ValueError(f"at least 1: {max_rank=} {max_cpu=}")
        self._config, self._max_rank, self._max_cpu = config, max_rank, max_cpu
        self._lock = Lock()
        self._places: dict[int, list[Place]] = {}  # all that the weights were loaded from, the last one first
        self._kept: OrderedDict[int, LoraWeights] = OrderedDict()  # the most recently used last

    def load(self, path: str | Place) -> int:
        """Reads the adapter of a folder, a GGUF file or a hub name. Equal weights have one identity.

        Raises:
            ValueError, OSError: as `adapter_place` and `read_adapter`.
        """
        place = adapter_place(path)
        found = self._read(place)
        with self._lock:
            others = [other for other in self._places.get(found.identity, ()) if other != place]
            self._places[found.identity] = [place, *others]
            self._keep(found)
        return found.identity

    def weights(self, identity: int) -> LoraWeights:
        """The adapter's weights, from any place that they were loaded from.

        Raises:
            ValueError: it is not loaded, or its files have changed.
            OSError: its files cannot be read.
        """
        with self._lock:
            if identity in self._kept:
                self._kept.move_to_end(identity)
                return self._kept[identity]
            places = self._places.get(identity, [])
        if not places:
            raise ValueError(f"no adapter is loaded that has the {identity=}")
        found = self._read_again(places, identity)
        with self._lock:
            if identity in self._places:
                self._keep(found)
        return found

    def forget(self, identity: int) -> None:
        """Drops an adapter. One that is not loaded is ignored."""
        with self._lock:
            self._places.pop(identity, None)
            self._kept.pop(identity, None)

    def _read(self, place: Place) -> LoraWeights:
        return read_adapter(place, self._config, max_rank=self._max_rank)

    def _read_again(self, places: Sequence[Place], identity: int) -> LoraWeights:
        """From the first place that still has the weights. If none has, the error is that of the first."""
        faults: list[ValueError | OSError] = []
        for place in places:
            try:
                found = self._read(place)
            except (ValueError, OSError) as error:
                faults.append(error)
            else:
                if found.identity == identity:
                    return found
                faults.append(ValueError(f"the adapter {place} has changed since it was loaded: load it again"))
        raise faults[0]

    def _keep(self, found: LoraWeights) -> None:
        self._kept[found.identity] = found
        self._kept.move_to_end(found.identity)
        while len(self._kept) > self._max_cpu:
            self._kept.popitem(last=False)
