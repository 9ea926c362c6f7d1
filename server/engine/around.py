"""An engine around another one, which does most of the work."""

from __future__ import annotations

from server.engine.process import ServedEngine


class EngineAround:
    """`ServedEngine` that passes everything on. Subclasses do more in some of the methods."""

    def __init__(self, engine: ServedEngine) -> None:
        self._inner = engine
        self.start = engine.start
        self.listen = engine.listen
        self.add_request = engine.add_request
        self.abort = engine.abort
        self.reset_prefix_cache = engine.reset_prefix_cache
        self.stats = engine.stats

    @property
    def death(self) -> BaseException | None:
        """As of the engine."""
        return self._inner.death

    def shutdown(self) -> None:
        """As of the engine."""
        self._inner.shutdown()
