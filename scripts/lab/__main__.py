"""Runs an instrument of the laboratory.

python -m scripts.lab                    lists the instruments
python -m scripts.lab NAME [FLAGS]       runs one; --help lists its flags
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def instruments() -> dict[str, str]:
    """The instruments by name: the first lines of the docstrings of this folder's modules that have a `main`."""
    found = {}
    for path in sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*/__init__.py")]):
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            name = path.parent.name if path.stem == "__init__" else path.stem
            found[name] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(argv: list[str]) -> int:
    """The command; returns the instrument's exit code."""
    name, *flags = argv or [""]
    known = instruments()
    if name in ("", "-h", "--help"):
        print(__doc__)
        print("\n".join(f"  {name:<12} {text}" for name, text in known.items()))
        return 0
    if name not in known:
        print(f"scripts.lab: there is no instrument {name!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"scripts.lab.{name}").main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
