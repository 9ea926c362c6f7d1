"""Compilers' accounts of kernels and steps for chips that are not attached: TPU bundles, GPU SASS and buffers."""
