"""How many chips share a model, if `--tensor-parallel-size` does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def choose_num_chips(
    asked: int | None,
    num_devices: int,
    check: Callable[[int], None],
    *,
    num_hosts: int = 1,
) -> int:
    """The chips that share the model: as asked for, or one if it fits there, otherwise the least power of two on which
    it fits. Several hosts share it over all their chips.

    Args:
        num_devices: there are so many chips, on all hosts together.
        check: raises ValueError if the model does not fit on so many chips, or cannot be divided over them.

    Raises:
        ValueError: the model fits on no number of chips (the error is that of the largest number), or several hosts
            are asked for another number than all their chips.
    """
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
            refusal = error
        else:
            return num_chips
    raise refusal


def describe_idle(num_chips: int, num_devices: int) -> str:
    """What of the chips is used, and how to use the others."""
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
