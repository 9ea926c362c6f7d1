"""The parts of the benchmark commands: load on a server, compilers' accounts, timings on a chip, simulated time.

`README.md` describes the measurements; `results/` has the figures.
"""
