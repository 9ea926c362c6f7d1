"""The soak itself, for seconds instead of minutes: it passes on a sound server and tells when one is not."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from random import Random

import psutil
import pytest

from tests.soak import __main__ as soak
from tests.soak.attacks import ATTACKS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_attacks_among_ordinary_traffic_leave_nothing_behind(built, engine_flags, capsys):
    code = soak.main(["--seconds", "3", "--clients", "4", "--attackers", "3", "--", *engine_flags])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "nothing is left behind" in said
    assert "'right': " in said
    assert any(attack.__name__ in said for attack in ATTACKS)


def test_growth_is_between_the_second_quarter_and_the_last():
    mib = 2**20
    assert soak.growth_mib([500 * mib, *[100 * mib] * 7]) == 0
    assert soak.growth_mib([100 * mib] * 6 + [150 * mib] * 2) == 50
    assert soak.growth_mib([1, 2]) == 0
    assert soak.in_quarters(list(range(10))) == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_long_run_may_grow_by_less_than_a_short_one():
    account = soak.Account()
    account.memory["http"] = [100 * 2**20] * 6 + [110 * 2**20] * 2
    soak.check_memory(account, 8)
    assert not account.problems
    soak.check_memory(account, 600)
    assert account.problems == ["the http process grew by 10 MiB"]


def test_every_attack_is_made_before_any_is_made_again():
    attacks = soak.attacks_in_rounds(Random(0))
    rounds = [list(islice(attacks, len(ATTACKS))) for _ in range(2)]
    assert rounds[0] != rounds[1]
    assert all(set(one) == set(ATTACKS) for one in rounds)


def test_a_child_that_outlives_the_server_is_a_problem(monkeypatch):
    monkeypatch.setattr(soak, "ENDING_S", 0.1)
    account = soak.Account()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        account.children.add(psutil.Process(child.pid))
        soak.check_children(account)
        assert account.problems == [f"a child process is left: {[sys.executable, '-c', 'input()']}"]
        child.communicate(b"\n")
    account.problems.clear()
    soak.check_children(account)
    assert not account.problems


def test_descriptors_and_children_are_counted_against_those_of_the_start():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        processes = soak.Processes.of(psutil.Process())
        before = processes.descriptors()
        assert not processes.left(before)
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        assert processes.left(before) == {"descriptors of the http process": 2}
        for descriptor in opened:
            os.close(descriptor)
        crowd = [subprocess.Popen(["sleep", "60"]) for _ in range(soak.NUM_TEMPLATE_PROCESSES + 1)]
        assert processes.left(before) == {"child processes": len(crowd)}
        for one in crowd:
            one.kill()
            one.wait()
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("line", "severe"),
    [
        ("2026-01-01 00:00:00,000 WARNING pallas_serve: 400 to 127.0.0.1: The request is incomplete.", False),
        ("2026-01-01 00:00:00,000 WARNING pallas_serve: 503 to 127.0.0.1: The server is reading too much.", False),
        ("2026-01-01 00:00:00,000 INFO pallas_serve: at most 8192 connections", False),
        ("2026-01-01 00:00:00,000 ERROR batcher.core: the idle engine is inconsistent", True),
        ("Traceback (most recent call last):", True),
    ],
)
def test_a_line_of_the_log_is_a_problem_unless_an_attack_provokes_it(line, severe, tmp_path):
    log = tmp_path / "log"
    log.write_text(line + "\n")
    account = soak.Account()
    soak.check_log(log, account)
    assert bool(account.problems) == severe
