"""What tokens cost on rented chips, and how many make renting cheaper than an API."""

from __future__ import annotations

from dataclasses import dataclass

HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a deployment that runs all the time."""

    currency: str  # of all prices
    per_month: float
    per_million_output: float  # at the simulated load; prompts are included in the price
    per_million_total: float  # tokens of prompts and outputs together
    capacity: float  # million tokens, in and out, that it can serve per month
    break_even: float | None  # the same unit; None: no API price was given
    break_even_share: float | None  # of the capacity: above 1 it never pays


def cost(
    price_per_hour: float,
    *,
    currency: str,
    output_tokens_per_s: float,
    total_tokens_per_s: float,
    capacity_tokens_per_s: float,
    api_price: float | None,
) -> Cost:
    """The cost of a deployment.

    Args:
        price_per_hour: of all chips together.
        output_tokens_per_s: at the simulated load, as `total_tokens_per_s`.
        capacity_tokens_per_s: in and out, at the highest load that it can serve.
        api_price: of a million tokens, in and out alike.
    """
    per_month = price_per_hour * HOURS_PER_MONTH
    seconds = 3600.0 / 1e6
    break_even = None if api_price is None else per_month / api_price
    capacity = capacity_tokens_per_s * seconds * HOURS_PER_MONTH
    return Cost(
        currency=currency,
        per_month=per_month,
        per_million_output=price_per_hour / (output_tokens_per_s * seconds),
        per_million_total=price_per_hour / (total_tokens_per_s * seconds),
        capacity=capacity,
        break_even=break_even,
        break_even_share=None if break_even is None else break_even / capacity,
    )
