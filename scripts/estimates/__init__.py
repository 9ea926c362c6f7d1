"""How long steps take on a chip, by published figures."""
