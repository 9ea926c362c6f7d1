"""How many chips share a model where nobody says."""

from __future__ import annotations

import pytest

from scripts.wiring.parallel import choose_num_chips, describe_idle


def fits_on(least: int):
    def check(num_chips: int) -> None:
        if num_chips < least:
            raise ValueError(f"{num_chips} do not do")

    return check


@pytest.mark.parametrize(("least", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8)])
def test_as_few_chips_as_the_model_fits_on(least, expected):
    assert choose_num_chips(None, 8, fits_on(least)) == expected


def test_a_model_that_fits_nowhere_is_refused_with_the_largest_number():
    with pytest.raises(ValueError, match="4 do not do"):
        choose_num_chips(None, 6, fits_on(16))


def test_what_is_asked_for_is_taken():
    assert choose_num_chips(2, 8, fits_on(4)) == 2


def test_a_converted_checkpoint_says_its_own_number():
    assert choose_num_chips(None, 8, fits_on(1), converted_for=4) == 4
    assert choose_num_chips(None, 2, fits_on(1), converted_for=4) == 1  # loading it says what is wrong


def test_several_hosts_share_a_model_over_all_their_chips():
    assert choose_num_chips(None, 8, fits_on(1), num_hosts=2) == 8
    assert choose_num_chips(8, 8, fits_on(1), num_hosts=2) == 8
    with pytest.raises(ValueError, match="2 hosts share a model over all their 8 chips"):
        choose_num_chips(4, 8, fits_on(1), num_hosts=2)


def test_idle_chips_are_named():
    assert describe_idle(1, 1) == "1 of 1 chip"
    assert describe_idle(8, 8) == "8 of 8 chips"
    line = "2 of 8 chips; 6 are idle: --tensor-parallel-size 8 answers one request sooner, "
    assert describe_idle(2, 8) == line + "--data-parallel-size 4 answers more requests at once"
