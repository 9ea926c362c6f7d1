"""Shell completion of a command's flags: `eval "$(scripts/serve --print-completion)"`, for bash and zsh."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, override

# zsh reads bash's completions after `bashcompinit`. Words that are no flags are completed as paths.
SCRIPT = """\
[ -z "${{ZSH_VERSION:-}}" ] || {{ autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; }}
_pallas_serve() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$previous" in
{choices}
        *) case "$word" in -*) words="{flags}" ;; esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _pallas_serve {command}
"""


class PrintCompletion(argparse.Action):
    """A flag that prints the completion of its parser's flags and exits, as `--help` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(completion(parser), end="")
        parser.exit()


def completion(parser: argparse.ArgumentParser) -> str:
    """The shell code. Suppressed flags are left out; the value of a flag with choices is one of them."""
    shown = [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings]
    choices = [
        f'        {"|".join(action.option_strings)}) words="{" ".join(map(str, action.choices))}" ;;'
        for action in shown
        if action.choices
    ]
    return SCRIPT.format(flags=" ".join(flags), choices="\n".join(choices), command=parser.prog)
