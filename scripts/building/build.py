"""Builds the engine of a server's process, or of an `LLM`. The rest of the package is imported when the chips of the
process are chosen, because it imports jax."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from batcher.engines import AnyEngine
from scripts.building.device import Report, find_device, phase, start_compiling
from scripts.building.replicas import claim_chips, compiling_first, wait_for_first
from scripts.flags.settings import ServedSettings
from server.engine.adapters import Adapters
from server.engine.process import BuiltEngine
from server.engine.weight_changes import WeightChanges
from server.text.tokenizer import ByteLevelTokenizer

if TYPE_CHECKING:
    from scripts.building.runner import Built


def build_served(served: ServedSettings, report: Report) -> BuiltEngine:
    """Builds the server's engine, whose weights may be changed. The tokens for structured output are read while
    programs are compiled."""
    tokenizer = partial(ByteLevelTokenizer.from_folder, served.tokenizer)
    engines, built, adapters = build(served, report, tokenizer, read_tokens=True)
    weights = WeightChanges(engines, built.runner_weights())
    return BuiltEngine(engine=engines, info=built.info, adapters=adapters, weights=weights)


def build(
    served: ServedSettings, report: Report, tokenizer: Callable[..., ByteLevelTokenizer], *, read_tokens: bool = False
) -> tuple[AnyEngine, Built, Adapters | None]:
    """A warmed-up engine in this process, not started, with its `Built` and its LoRA adapters.

    Raises ValueError if a setting, the model or the device cannot be used.

    Args:
        tokenizer, read_tokens: the arguments of `warm_engine`.
    """
    settings = served.engine
    if served.num_replicas > 1:
        settings = claim_chips(served, find_device() if settings.device == "auto" else settings.device)
    turn, is_first = served.compile_turn, served.compile_turn is None or served.replica == 0
    folders = start_compiling(settings) if is_first else None
    from scripts.building.engine_plans import plan_engines
    from scripts.building.runner import build_runner, make_publisher, warm_engine
    from scripts.building.shapes import with_models

    publisher = make_publisher(settings, report, rank=served.replica)
    with compiling_first(turn) if turn is not None and is_first else nullcontext(), ExitStack() as on_failure:
        if publisher is not None:
            on_failure.callback(publisher.close)
        plan, *others = plan_engines(settings, report, served.tokenizer, folders=folders)
        built = build_runner(settings, report, compile_meanwhile=is_first, plan=plan)
        if turn is not None and not is_first:
            with phase("wait", report) as say:
                wait_for_first(turn)
                say("for the programs of engine 0")
        engine = warm_engine(built, report, tokenizer, read_tokens=read_tokens, publisher=publisher)
        engines, adapters = with_models(built, engine, others, publisher, report)
        on_failure.pop_all()
    return engines, built, adapters
