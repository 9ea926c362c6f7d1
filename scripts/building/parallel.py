"""Chooses the number of chips that share a model, if `--tensor-parallel-size` is not given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scripts.building.choices import choose_model_len

CONTEXT_STEP = 256  # tokens


def choose_num_chips(
    asked: int | None,
    num_devices: int,
    check: Callable[[int], None],
    *,
    num_hosts: int = 1,
) -> int:
    """The number of chips that share the model: `asked`, or else the least power of two on which the model fits.
    Several hosts use all their chips.

    Args:
        num_devices: the number of chips, on all hosts together.
        check: raises ValueError if the model does not fit on so many chips, or cannot be divided over them.

    Raises:
        ValueError: the model fits on no number of chips (the error is that of the largest number, or the first about
            the attention backend), or `asked` is not the number of all chips of several hosts.
    """
    from pallas_kernels.spec import UnavailableError

    if num_hosts > 1:
        if asked not in (None, num_devices):
            raise ValueError(
                f"--tensor-parallel-size {asked}: {num_hosts} hosts share a model over all their {num_devices} chips"
            )
        return num_devices
    if asked is not None:
        return asked
    if num_devices == 1:
        return 1  # the runner says whether the model fits
    refusal = ValueError("there is no chip")
    for num_chips in _powers_of_two(num_devices):
        try:
            check(num_chips)
        except ValueError as error:
            if not isinstance(refusal, UnavailableError):
                refusal = error
        else:
            return num_chips
    raise refusal


def choose_chips_and_context(
    asked_chips: int | None,
    num_devices: int,
    asked_context: int | None,
    trained_context: int,
    check: Callable[[int, int], None],
    *,
    num_hosts: int = 1,
) -> tuple[int, int]:
    """The number of chips that share the model, and the tokens of the longest request.

    If `asked_context` is None, the context is the one that the model was trained for, or else the longest that fits on
    as many chips as possible, in steps of CONTEXT_STEP tokens. Several hosts could find different contexts, so they
    need `asked_context`.

    Args:
        check: raises DoesNotFitError if requests of a context do not fit on a number of chips.

    Raises:
        DoesNotFitError: the asked context does not fit, or no context.
    """
    from model.execution.memory_plan import DoesNotFitError

    context = choose_model_len(asked_context, trained_context)
    try:
        chips = choose_num_chips(asked_chips, num_devices, lambda number: check(number, context), num_hosts=num_hosts)
        check(chips, context)
        return chips, context
    except DoesNotFitError as error:
        if asked_context is not None or num_hosts > 1:
            raise
        chips = asked_chips or max(_powers_of_two(num_devices))
        longest = error.longest // CONTEXT_STEP * CONTEXT_STEP
        if not longest:
            raise
    check(chips, longest)
    return chips, longest


def describe_idle(num_chips: int, num_devices: int) -> str:
    """A remark on how many of the chips are used, and how to use the others."""
    used = f"{num_chips} of {num_devices} chip{'s' if num_devices > 1 else ''}"
    idle = num_devices - num_chips
    if not idle:
        return used
    engines = num_devices // num_chips
    more = [f"--tensor-parallel-size {num_devices} answers one request sooner"]
    if engines > 1:
        more.append(f"--data-parallel-size {engines} answers more requests at once")
    return f"{used}; {idle} {'is' if idle == 1 else 'are'} idle: {', '.join(more)}"


def _powers_of_two(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2
