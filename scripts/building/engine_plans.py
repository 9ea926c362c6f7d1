"""The plans of the engines of one process: one for each shape and form of models, which share the device's memory.

`--memory-utilization` bounds all its engines together. Each needs the weights of its models, the temporaries of its
largest step, its state, and the K/V pages of one request of its longest context. The rest of the memory is for further
K/V pages: each engine gets as many tokens, or less if it has no use for them. `--num-pages` sets the pages of --model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from model.execution.device_memory import device_memory
from model.execution.memory_plan import GIB, HOST_RESERVE, SELF_TEST_BYTES, memory_needs, useful_pages, weights_bytes
from model.inputs.words import one_line
from scripts.building.attention_backend import BACKENDS, Backends
from scripts.building.device import Report, started_device
from scripts.building.limits import LEAST_MODELS, EnginePlan, choose_limits
from scripts.building.models import choose_model, folder_of
from scripts.building.weights import ChosenWeights, unlike
from scripts.flags.lora import MODELS
from scripts.flags.settings import EngineSettings

MOST_MODELS = 8  # of a shape on the device by default, if a folder has them


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The bytes of the device's memory that an engine needs, or can use."""

    plan: EnginePlan
    names: Sequence[str]  # of its models
    one_model: int  # the weights of one model
    steps: int  # temporaries and state
    page: int
    page_size: int  # tokens
    least_kv: int
    most_kv: int

    @classmethod
    def of(cls, plan: EnginePlan, names: Sequence[str] = ()) -> Needs:
        chips, limits = plan.chips, replace(plan.chips.limits, max_models=1)
        attention = chips.first_attention()
        found = memory_needs(chips.planned, attention, limits, chips.draft_over(attention.backend))
        size, weights = attention.spec.page_size, weights_bytes(chips.planned)
        useful = useful_pages(found, limits, page_size=size, is_host=plan.device.platform == "cpu")
        least, most = limits.num_pages or -(-limits.max_model_len // size), limits.num_pages or useful
        return cls(
            plan=plan,
            names=names,
            one_model=weights,
            steps=found.weights - weights + found.state + found.temporaries,
            page=found.page,
            page_size=size,
            least_kv=(least + 1) * found.page,  # with the null page
            most_kv=(most + 1) * found.page,
        )

    def besides_kv(self, num_models: int) -> int:
        return num_models * self.one_model + self.steps

    def in_words(self, num_models: int, kv_bytes: int) -> str:
        weights = f"weights {num_models} x {self.one_model / GIB:.2f} GiB, steps {self.steps / GIB:.2f} GiB"
        tokens = (kv_bytes // self.page - 1) * self.page_size
        return f"{', '.join(self.names)}: {weights}, K/V of {tokens} tokens {kv_bytes / GIB:.2f} GiB"


def divide(room: int, engines: Sequence[Needs], counts: Sequence[int]) -> list[int] | None:
    """The bytes of each engine's K/V pages, if it has so many models on the device. None: the room is too small.

    The tokens beyond `least_kv` are as many for each engine, up to its `most_kv`.
    """
    kv = [needs.least_kv for needs in engines]
    left = room - sum(kv) - sum(needs.besides_kv(count) for needs, count in zip(engines, counts, strict=True))
    if left < 0:
        return None
    per_token = [needs.page / needs.page_size for needs in engines]
    spare = [needs.most_kv - needs.least_kv for needs in engines]
    rows = sorted(range(len(engines)), key=lambda i: spare[i] / per_token[i])
    for place, i in enumerate(rows):
        more = min(spare[i], int(left * per_token[i] / sum(per_token[j] for j in rows[place:])))
        kv[i], left = kv[i] + more, left - more
    return kv


def share_memory(engines: Sequence[Needs], report: Report, *, taken: int = 0) -> None:
    """Gives each engine its part of the device's memory, and reports it.

    As with one shape, as many models are on the device as leave half of the K/V pages. An engine with several models
    has at least two there.

    Args:
        taken: the bytes that other engines of this process may take. A host counts those as free that they have not
            used yet.

    Raises:
        ValueError: the models do not fit.
    """
    settings, memory = engines[0].plan.settings, device_memory(jax.local_devices()[0])
    free = memory.free - (HOST_RESERVE + SELF_TEST_BYTES if memory.is_host else 0)
    room = min(int(memory.total * settings.memory_utilization), free) - taken
    asked, least = settings.max_resident_models, MOST_MODELS if settings.models_folder else LEAST_MODELS
    few = [asked or min(len(needs.names), LEAST_MODELS) for needs in engines]
    most = [asked or max(len(needs.names), least) for needs in engines]
    used = f"--memory-utilization {settings.memory_utilization:g} of {memory.total / GIB:.2f} GiB"
    kv, counts = divide(room, engines, few), few
    if kv is None:
        listed = "; ".join(needs.in_words(count, needs.least_kv) for needs, count in zip(engines, few, strict=True))
        raise ValueError(
            f"the models do not fit together: {max(room, 0) / GIB:.2f} GiB are free for them ({used}), and they need "
            f"{listed}. Lower --max-model-len (K/V), --max-num-batched-tokens or --max-num-seqs (steps), raise "
            f"--memory-utilization, take --quantization, or leave out a model"
        )
    half = sum(kv) / 2
    for number in range(1, max(most) + 1):
        more = [max(a, min(b, number)) for a, b in zip(few, most, strict=True)]
        found = divide(room, engines, more)
        if found is not None and sum(found) >= half:
            kv, counts = found, more
    report(f"  memory            {used} for {len(engines)} shape{'s' if len(engines) > 1 else ''} of models")
    for needs, count, kv_bytes in zip(engines, counts, kv, strict=True):
        needs.plan.chips.limits = replace(needs.plan.chips.limits, max_models=count, kv_bytes=kv_bytes)
        report(f"    {needs.in_words(count, kv_bytes)}, {len(needs.plan.ladder.buckets())} programs")


def plan_engines(
    settings: EngineSettings, report: Report, tokenizer: Path | None, backends: Backends = BACKENDS, **started: Any
) -> list[EnginePlan]:
    """Starts the device, and plans the engines for the models of the settings. The first plan is that of --model.

    Args:
        tokenizer, backends: the arguments of `choose_limits`.
        started: those of `started_device`.

    Raises:
        ValueError: a model cannot be used, or they do not fit.
    """
    device = started_device(settings, report, **started)
    first = choose_limits(settings, device, report, tokenizer=tokenizer, backends=backends)
    plans, names = [first], [["--model", *(["--models-folder"] if settings.models_folder else [])]]
    for each in settings.named_models:
        try:
            weights = choose_model(first, each.path)
            number = next((i for i, plan in enumerate(plans) if not unlike(weights, plan.weights)), None)
            if number is None:
                number = len(plans)
                plans.append(plan_beside(replace(first, settings=settings), each.path, weights))
                names.append([])
        except (ValueError, OSError) as error:
            raise ValueError(f"{MODELS} {each.name}={each.path}: {one_line(str(error))}") from error
        names[number].append(each.name)
    if settings.has_models:
        share_memory([Needs.of(*pair) for pair in zip(plans, names, strict=True)], report)
    return plans


def plan_beside(first: EnginePlan, path: str, weights: ChosenWeights) -> EnginePlan:
    """The plan of an engine for a model of another shape, without its part of the memory. It has no adapters and no
    drafts, and its pages stay on the device. Raises ValueError if it cannot be used."""
    settings, another = first.settings, f"{path} is a model of another shape than --model"
    num_chips = first.chips.num_chips
    if num_chips > 1:
        raise ValueError(f"{another}, which excludes --tensor-parallel-size {num_chips}")
    if settings.kv_events is not None:
        raise ValueError(f"{another}, which excludes --kv-events-config")
    if folder_of(weights) is None and weights.config.vocab_size != first.weights.config.vocab_size:
        raise ValueError(f"{another}, and has no tokenizer of its own for its {weights.config.vocab_size} tokens")
    most, names = settings.max_model_len, "num_pages speculative_config lora_modules lora_folder kv_offloading_path"
    off: dict[str, Any] = dict.fromkeys(names.split())
    own = replace(
        settings,
        model=path,
        max_model_len=None if most is None else min(most, weights.config.max_position_embeddings),
        tensor_parallel_size=1,
        enable_lora=False,
        kv_offloading_size=0,
        **off,
    )
    return choose_limits(own, first.device, lambda line: None, tokenizer=None, backends=BACKENDS, weights=weights)
