"""The soak itself, for seconds instead of minutes: it passes on a sound server and tells when one is not."""

from __future__ import annotations

import os
import subprocess
import sys

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
