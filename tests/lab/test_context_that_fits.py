"""A start without `--max-model-len` takes the longest context that fits, of small and large models on several chips."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from model.execution.memory_plan import DoesNotFitError
from model.presets import PRESETS
from scripts.building.chips import CONTEXT_STEP, choose_chips_and_context
from scripts.flags.settings import EngineSettings
from scripts.lab.planning.memory import Sizes, size_up
from scripts.lab.planning.target import parse_target

SETTINGS = {form: EngineSettings(load_format="dummy", quantization=form) for form in (None, "int8")}


@cache
def sizes(preset: str, chip: str, number: int, form: str | None) -> Sizes:
    return size_up(replace(SETTINGS[form], model=f"preset:{preset}"), parse_target(chip), number)


def check(preset: str, chip: str, form: str | None, number: int, context: int) -> None:
    """Raises DoesNotFitError."""
    replace(sizes(preset, chip, number, form), max_model_len=context).memory(SETTINGS[form])


@pytest.mark.parametrize(
    ("preset", "chip", "form", "devices"),
    [
        ("llama-3.2-1b", "l4", None, 1),
        ("llama-3.2-1b", "v6e", "int8", 8),
        ("llama-3.1-8b", "l4", None, 8),
        ("llama-3.1-8b", "l4", "int8", 1),
        ("llama-3.1-8b", "v6e", None, 1),
        ("llama-3.3-70b", "v6e", None, 8),
        ("llama-3.3-70b", "v6e", "int8", 1),
        ("llama-3.3-70b", "l4", "int8", 8),
    ],
)
def test_the_longest_context_that_fits_is_taken(preset, chip, form, devices):
    trained = PRESETS[preset].max_position_embeddings

    def fits(number: int, context: int) -> None:
        check(preset, chip, form, number, context)

    try:
        fits(devices, CONTEXT_STEP)
    except DoesNotFitError:
        with pytest.raises(DoesNotFitError, match=r"GiB.*--max-model-len.*--tensor-parallel-size"):
            choose_chips_and_context(None, devices, None, trained, fits)
        return
    number, context = choose_chips_and_context(None, devices, None, trained, fits)
    fits(number, context)
    assert number <= devices and context <= trained
    if context < trained:
        assert number == devices and context % CONTEXT_STEP == 0
        with pytest.raises(DoesNotFitError):
            fits(number, context + 2 * CONTEXT_STEP)
    if number > 1:
        with pytest.raises(DoesNotFitError):
            fits(number // 2, trained)
