"""Weights that a thread of its own brings to the device, and weights that are there."""

from __future__ import annotations

from collections.abc import Iterable


class Staging:
    """The weights of one kind, by their identities. Only the engine's thread calls its methods."""

    def __init__(self) -> None:
        self.there: set[int] = set()  # on the device
        self.coming: dict[int, bool] = {}  # being brought -> False if the device has lost it since
        self._to_drop: set[int] = set()

    def drop(self, identities: Iterable[int]) -> None:
        """Lets weights that are there leave the device."""
        leaving = self.there.intersection(identities)
        self.there -= leaving
        self._to_drop |= leaving

    def take_drops(self) -> list[int]:
        """The weights to drop now, before others are brought."""
        drops, self._to_drop = sorted(self._to_drop), set()
        return drops

    def ask(self, identities: Iterable[int]) -> None:
        """Records that these are being brought."""
        self.coming.update(dict.fromkeys(identities, True))

    def came(self, identity: int, *, is_there: bool) -> bool:
        """Records the result of bringing. Returns whether the weights can be used."""
        is_kept = self.coming.pop(identity)
        if is_there:
            (self.there if is_kept else self._to_drop).add(identity)
        return is_there and is_kept

    def forget(self) -> None:
        """Records that the device has lost all weights. Those that are there, or are coming, are to be dropped."""
        self.drop(set(self.there))
        self.coming = dict.fromkeys(self.coming, False)
