"""Updates of a runner's weights from a folder, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from model.loading.source import DEMO_FOLDER
from scripts.building.changeable import FolderUpdates, RunnerUpdates, RunnerWeights
from scripts.building.weights import choose_weights
from scripts.flags.settings import EngineSettings
from server.engine.wire import KV_CACHE, ChangeWeights, InFolder, InSharedMemory, WeightsChange
from tests.scripts.test_changeable import DROP, SLEEP, WAKE_UP, Changed

ARRAYS = InSharedMemory("block", ())


def updates_of(changed: Changed) -> RunnerUpdates:
    return RunnerUpdates(changed.loader, changed.weights)


def change(changed: Changed, command: ChangeWeights) -> None:
    changed.weights.check(command)
    changed.weights.prepare()
    changed.weights.commit()


def test_a_folder_is_found_by_the_check_and_read_by_the_commit():
    changed = Changed()
    updates = updates_of(changed)
    updates.begin()
    updates.receive(InFolder(str(DEMO_FOLDER)))
    updates.check()
    assert changed.are_the_first()
    updates.commit()
    assert not changed.are_the_first()
    with pytest.raises(ValueError, match="nothing has been received"):
        updates.check()  # nothing is kept of the update


@pytest.mark.parametrize("fault", ["read", "place"])
def test_a_folder_that_cannot_be_read_to_its_end_leaves_the_old_weights(fault):
    changed = Changed(fault)
    updates = updates_of(changed)
    updates.receive(InFolder(str(DEMO_FOLDER)))
    updates.check()
    with pytest.raises(OSError, match="the disk has failed"):
        updates.commit()
    assert changed.are_the_first()


def test_a_folder_that_is_not_there_does_not_pass_the_check(tmp_path):
    changed = Changed()
    updates = updates_of(changed)
    updates.receive(InFolder(str(tmp_path / "none")))
    with pytest.raises(ValueError, match="there is no such folder or file on this machine"):
        updates.check()
    updates.abandon()
    with pytest.raises(ValueError, match="nothing has been received"):
        updates.check()
    assert changed.are_the_first()


def test_a_folder_takes_the_place_of_weights_that_were_dropped_and_not_of_those_that_the_host_keeps():
    changed = Changed()
    updates = updates_of(changed)
    updates.receive(InFolder(str(DEMO_FOLDER)))
    change(changed, SLEEP)
    with pytest.raises(ValueError, match="wake it up"):
        updates.check()
    change(changed, DROP)
    updates.check()
    updates.commit()
    assert changed.weights.missing == {KV_CACHE}
    change(changed, WAKE_UP)
    assert not changed.are_away() and not changed.are_the_first()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_weights_whose_pages_other_servers_know_are_not_updated(role):
    settings = EngineSettings(device="cpu", kv_offloading_size=1, kv_role=role)
    changed = Changed()
    weights = RunnerWeights(changed.loader, settings, choose_weights(settings, "cpu"), "cpu")
    with pytest.raises(ValueError, match=f"--kv-role {role}"):
        RunnerUpdates(changed.loader, weights).begin()


class Hosts:
    """`server.engine.process.Weights` of several hosts."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def check(self, command: ChangeWeights) -> Mapping[str, str]:
        self.done.append(command)
        return {}

    def prepare(self) -> None:
        self.done.append("prepared")

    def commit(self) -> None:
        self.done.append("committed")

    def abandon(self) -> None:
        raise AssertionError("nothing has failed")


def test_several_hosts_take_a_folder_only_and_do_all_of_it_between_two_steps():
    hosts = Hosts()
    updates = FolderUpdates(hosts)
    updates.begin()
    with pytest.raises(ValueError, match="several hosts take weights from a folder only"):
        updates.receive(ARRAYS)
    with pytest.raises(ValueError, match="no folder has been received"):
        updates.check()
    updates.receive(InFolder("/weights"))
    updates.check()
    assert hosts.done == []
    updates.commit()
    assert hosts.done == [ChangeWeights(WeightsChange.RELOAD, "/weights"), "prepared", "committed"]
    with pytest.raises(ValueError, match="no folder has been received"):
        updates.check()
