"""A step on its way to the device and back: the packing of its arrays, and the reading of its result."""
