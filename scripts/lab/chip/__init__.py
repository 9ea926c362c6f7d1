"""The parts of `scripts/check` (`parts`). `progress` runs them in order, `__main__` runs one in its process."""
