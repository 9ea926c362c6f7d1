"""The parts of `scripts/check`, one file each. `progress` runs them in order, `__main__` runs one in its process."""

PARTS = ("versions", "kernels", "pool", "text", "engines", "speed", "steps", "load")
