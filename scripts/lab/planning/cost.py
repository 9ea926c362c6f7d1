"""What tokens cost on rented chips, and how many make renting cheaper than an API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, kw_only=True)
class ApiPrice:
    """The price of a hosted API, for a million tokens."""

    name: str
    input: float
    output: float

    def __str__(self) -> str:
        return f"{self.name}={self.input:g}/{self.output:g}"

    @classmethod
    def parse(cls, text: str) -> ApiPrice:
        """`0.2`, `0.05/0.08` or `NAME=0.05/0.08`. Raises ValueError for any other text."""
        name, _, prices = text.rpartition("=")
        try:
            numbers = [float(price) for price in prices.split("/")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2 or not all(0 < number < float("inf") for number in numbers):
            raise ValueError(f"--api-price {text}: it is a positive price, IN/OUT, or NAME=IN/OUT")
        return cls(name=name or "the API", input=numbers[0], output=numbers[-1])


@dataclass(frozen=True, kw_only=True)
class ApiCost:
    """The cost of the deployment's tokens at an API."""

    price: ApiPrice
    per_million_total: float  # tokens of prompts and outputs together
    per_month: float  # of as many tokens as at the load
    difference: float  # from the deployment, per month; positive: the API costs more
    break_even: float  # million tokens, in and out, per month from which on the deployment is cheaper
    break_even_share: float  # of the capacity: above 1 it never pays


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a deployment that runs all the time."""

    currency: str  # of all prices
    per_hour: float
    per_month: float
    per_million_output: float  # at the load; prompts are included in the price
    per_million_total: float  # tokens of prompts and outputs together
    capacity: float  # million tokens, in and out, that it can serve per month
    apis: Sequence[ApiCost]


def cost(
    price_per_hour: float,
    *,
    currency: str,
    output_tokens_per_s: float,
    total_tokens_per_s: float,
    capacity_tokens_per_s: float,
    apis: Sequence[ApiPrice] = (),
) -> Cost:
    """The cost of a deployment.

    Args:
        price_per_hour: of all chips together.
        output_tokens_per_s: at the load, as `total_tokens_per_s`.
        capacity_tokens_per_s: in and out, at the highest load that it can serve.
    """
    per_month = price_per_hour * HOURS_PER_MONTH
    seconds = 3600.0 / 1e6
    capacity = capacity_tokens_per_s * seconds * HOURS_PER_MONTH
    share = output_tokens_per_s / total_tokens_per_s

    def at_api(price: ApiPrice) -> ApiCost:
        mixed = price.input * (1 - share) + price.output * share
        at_load = mixed * total_tokens_per_s * seconds * HOURS_PER_MONTH
        return ApiCost(
            price=price,
            per_million_total=mixed,
            per_month=at_load,
            difference=at_load - per_month,
            break_even=per_month / mixed,
            break_even_share=per_month / mixed / capacity,
        )

    return Cost(
        currency=currency,
        per_hour=price_per_hour,
        per_month=per_month,
        per_million_output=price_per_hour / (output_tokens_per_s * seconds),
        per_million_total=price_per_hour / (total_tokens_per_s * seconds),
        capacity=capacity,
        apis=[at_api(price) for price in apis],
    )


@cache
def listed() -> dict[str, Any]:
    """Prices in US dollars of chips per hour and of APIs, each with its date and its source."""
    prices: dict[str, Any] = json.loads(Path(__file__).with_name("prices.json").read_text())
    return prices
