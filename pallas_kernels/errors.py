"""Errors of the room, for modules that do not import jax."""


class UnavailableError(ValueError):
    """A backend cannot be used here, but another one can. The message says why, and what to do."""
