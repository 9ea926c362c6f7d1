"""Kinds of traffic by name: distributions of the lengths of prompts and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.lab.load.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Lengths in tokens."""

    prompts: Lengths
    outputs: Lengths
    num_shared: int = 0  # tokens of a system prompt that all prompts begin with; part of the prompts' lengths


TRAFFIC = {
    # The medians and tails of Azure's traces of 2023 (conversation and code).
    "chat": Traffic(
        prompts=Lengths.parse("lognormal:1020:0.8:4:4142"), outputs=Lengths.parse("lognormal:150:0.9:1:1000")
    ),
    "code": Traffic(
        prompts=Lengths.parse("lognormal:1500:0.9:4:7437"), outputs=Lengths.parse("lognormal:13:1.1:1:1899")
    ),
    # Several retrieved passages after a common instruction, and a short answer. Not from a trace.
    "rag": Traffic(
        prompts=Lengths.parse("lognormal:4000:0.4:800:12000"),
        outputs=Lengths.parse("lognormal:200:0.6:10:800"),
        num_shared=400,
    ),
    # Documents that are summarised or labelled overnight. Not from a trace.
    "batch": Traffic(
        prompts=Lengths.parse("lognormal:1200:0.6:100:6000"), outputs=Lengths.parse("lognormal:300:0.6:20:1500")
    ),
    # Turns of agents: common instructions and tools, a history that grows, a call or a short answer. Not from a trace.
    "agents": Traffic(
        prompts=Lengths.parse("lognormal:8000:0.6:3500:24000"),
        outputs=Lengths.parse("lognormal:200:0.9:20:2000"),
        num_shared=3000,
    ),
}
