"""Shell completion, in a real bash."""

import subprocess

import pytest

from scripts import launch
from scripts.flags.parsing import completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-num-p"], {"--max-num-partial-prefills"}),
        (["--max-num-b"], {"--max-num-batched-tokens"}),
        (["--dtype", ""], {"auto", "bfloat16", "float32"}),
        (["--seed", "1", "--log-level", "w"], {"warning"}),
        (["--enforce"], set()),  # accepted from vLLM's command lines, and not offered
        (["--model", "mod"], set()),  # paths are the shell's
    ],
)
def test_flags_and_their_choices_are_completed(words, expected):
    line = " ".join(f"'{word}'" for word in ["scripts/serve", *words])
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _pallas_serve"
    script = f'{completion(launch.parser())}{asked}; echo "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-uec", script], capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert set(found.stdout.split()) == expected


def test_the_flag_prints_it_and_ends(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        launch.parser().parse_args(["--print-completion"])
    assert capsys.readouterr().out == completion(launch.parser())
