"""Reads settings from the command line: the flags of the commands, their files and their errors. It imports no jax."""
