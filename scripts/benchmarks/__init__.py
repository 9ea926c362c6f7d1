"""What the benchmark commands measure with: load on a server, compilers' accounts, timings on a chip, simulated time.

`README.md` says how figures are taken; `results/` keeps them.
"""
