"""The leader's and the followers' connections, over real sockets on the loopback interface."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from batcher.errors import StepTimeoutError
from server.engine.hosts import commands
from server.engine.hosts.cluster import Cluster, HostsError
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader
from server.engine.hosts.served import BroadcastRunner, FollowingEngine, end_hosts
from server.engine.hosts.sockets import leader_keys
from tests.server.engine.hosts import loopback

pytestmark = pytest.mark.slow


def following(follower: Follower, runner: loopback.RecordingRunner) -> loopback.Exits:
    exits = loopback.Exits()
    weights = None  # which are not changed
    FollowingEngine(runner, follower, exits, weights, {}, most_in_flight=1, leave=lambda: None).start()
    return exits


def ended(death: BaseException | None = None) -> Any:
    """An engine that has ended."""
    return SimpleNamespace(death=death)


def test_a_follower_replays_what_the_leader_does(hosts):
    leader, follower = hosts.together()
    ours, theirs = loopback.RecordingRunner(), loopback.RecordingRunner()
    runner = BroadcastRunner(ours, leader)

    def compile_there() -> None:
        command = follower.expect(commands.Compile)
        follower.answer(command, lambda: theirs.compile(command.buckets, loopback.say_nothing))

    thread = threading.Thread(target=compile_there)
    thread.start()
    runner.warm_up(loopback.BUCKETS, loopback.say_nothing)
    thread.join(30)
    exits = following(follower, theirs)
    for number in range(2, 6):
        runner.execute(loopback.step(number))
    runner.recover()
    runner.execute(loopback.step(6))

    left = []
    end_hosts(ended(), leader, lambda: left.append(True))
    assert exits.ends.get(timeout=30) == "ended"
    expected = [loopback.BUCKETS, 0, 1, 2, 3, 4, 5, "recover", 6]
    assert theirs.seen(9) == ours.seen(9) == expected
    assert left == [True]
    assert hosts.failures[0].empty() and hosts.failures[1].empty()


def test_the_hosts_use_the_pages_that_all_of_them_have(hosts):
    leader, follower = hosts.together()
    used = SimpleQueue()
    thread = threading.Thread(target=lambda: used.put(follower.agree(7, loopback.SETTINGS)))
    thread.start()
    assert leader.agree(9, loopback.SETTINGS) == 7
    assert used.get(timeout=30) == 7
    thread.join(30)


def test_hosts_that_differ_do_not_start(hosts):
    leader, follower = hosts.leader(), hosts.follower()
    with loopback.arriving(follower, {"--dtype": "bfloat16"}) as errors:
        with pytest.raises(HostsError, match=r"host 1 \(.*--dtype \(bfloat16, not float32\): all hosts need the same"):
            leader.gather(loopback.SETTINGS, loopback.say_nothing)
        leader.fail("they differ")
    assert "the leader has ended: they differ" in str(errors[0])


def test_a_host_that_does_not_come_ends_the_start_in_words():
    hosts = loopback.Hosts(num_hosts=3, timeout_s=1.5)
    leader, follower = hosts.leader(), hosts.follower(2)
    lines: list[str] = []
    with loopback.arriving(follower) as errors:
        with pytest.raises(HostsError, match=r"host 1 of 3 did not come within 1.5 s \(--hosts-timeout\)"):
            leader.gather(loopback.SETTINGS, lines.append)
        leader.fail("host 1 did not come")
    assert lines == ["  waiting for hosts 1, 2 of 3", "  waiting for host 1 of 3"]
    assert errors
    follower.close()


def test_a_leader_that_does_not_answer_is_named():
    hosts = loopback.Hosts(timeout_s=1.5)
    follower, lines = hosts.follower(), []
    with pytest.raises(HostsError, match=r"the leader at 127.0.0.1:\d+ did not answer within 1.5 s"):
        follower.arrive(loopback.SETTINGS, lines.append)
    assert len(lines) == 1
    follower.close()


def test_a_host_with_another_secret_is_kept_out():
    hosts = loopback.Hosts(timeout_s=3)
    leader, stranger = hosts.leader(), hosts.follower(secret="another secret than that")
    with (
        loopback.arriving(stranger) as errors,
        pytest.raises(HostsError, match=r"did not come.*a connection was refused: do all hosts have the same secret\?"),
    ):
        leader.gather(loopback.SETTINGS, loopback.say_nothing)
    assert "do all hosts have the same secret?" in str(errors[0])
    for close in hosts.open:
        close()


def test_whoever_comes_later_takes_not_even_a_descriptor(hosts):
    leader, follower = hosts.together()
    before = psutil.Process().num_fds()
    for offset in (1, 2):
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", hosts.cluster.port + offset), timeout=0.5)
    assert psutil.Process().num_fds() <= before  # ZeroMQ may still close some of other tests
    leader.send(commands.Recover())  # those that are there go on
    assert isinstance(follower.next_command(), commands.Recover)


def test_two_hosts_with_one_number_do_not_start(hosts):
    hosts.cluster = replace(hosts.cluster, num_hosts=3)
    leader, first, second = hosts.leader(), hosts.follower(1), hosts.follower(1)
    with loopback.arriving(first), loopback.arriving(second):
        with pytest.raises(HostsError, match="two hosts have --host-id 1"):
            leader.gather(loopback.SETTINGS, loopback.say_nothing)
        leader.fail("two hosts have one number")
        second.close()
        hosts.open.clear()
    first.close()


def test_a_follower_that_goes_is_named(hosts):
    _, follower = hosts.together()
    hosts.open.remove(follower.close)
    follower.close()
    assert "host 1 (" in (reason := hosts.failures[0].get(timeout=30))
    assert "has gone: its connection has closed" in reason


def test_a_loss_is_noticed_while_another_host_reports():
    hosts = loopback.Hosts(num_hosts=3)
    leader, first, second = hosts.leader(), hosts.follower(1), hosts.follower(2)
    with loopback.arriving(first), loopback.arriving(second):
        leader.gather(loopback.SETTINGS, loopback.say_nothing)
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(0.01):
            second.answer(commands.Prepare(number=10**6), lambda: None)

    thread = threading.Thread(target=report)
    thread.start()
    first.close()
    try:
        assert "host 1 (" in hosts.failures[0].get(timeout=30)
    finally:
        is_over.set()
        thread.join(30)
        for close in hosts.open:
            close()


def test_a_leader_that_goes_is_named(hosts):
    leader, _ = hosts.together()
    leader.fail("StepTimeoutError: the device is stuck")
    reason = hosts.failures[1].get(timeout=30)
    assert reason == "the leader has ended: StepTimeoutError: the device is stuck"


def test_an_engine_that_dies_tells_the_followers_why(hosts):
    leader, _ = hosts.together()
    dead = ended(StepTimeoutError("the device is stuck"))
    end_hosts(dead, leader, lambda: pytest.fail("a dead engine leaves nothing in order"))
    assert hosts.failures[1].get(timeout=30) == "the leader has ended: StepTimeoutError: the device is stuck"
    assert hosts.failures[0].empty()


def test_a_step_that_fails_because_a_host_is_lost_is_not_the_reason(hosts):
    leader, follower = hosts.together()
    hosts.open.remove(follower.close)
    follower.close()
    end_hosts(ended(RuntimeError("connection reset by peer")), leader, lambda: None)
    assert "has gone: its connection has closed" in hosts.failures[0].get(timeout=30)


def test_a_follower_says_why_it_ends(hosts):
    _, follower = hosts.together()
    hosts.open.remove(follower.close)
    follower.fail("a chip is missing")
    assert hosts.failures[0].get(timeout=30).endswith("): a chip is missing")


def test_messages_of_another_version_are_an_error(hosts):
    _, follower = hosts.together()
    hosts.open.remove(follower.close)
    follower.sockets.reports.send(b"?")
    assert "do all hosts run the same version?" in hosts.failures[0].get(timeout=30)
    assert "do all hosts run the same version?" in hosts.failures[1].get(timeout=30)  # the leader has told it
    follower.close()


def test_a_step_that_fails_on_all_hosts_is_recovered_from(hosts):
    leader, follower = hosts.together()
    theirs = loopback.RecordingRunner(failing=(1,))
    exits = following(follower, theirs)
    runner = BroadcastRunner(loopback.RecordingRunner(), leader)
    for number in range(4):  # the third waits for the first to return, and finds that the second has failed
        runner.execute(loopback.step(number))
    runner.recover()
    runner.execute(loopback.step(9))
    assert theirs.seen(5) == [0, 1, 2, "recover", 9]
    leader.stop()
    assert exits.ends.get(timeout=30) == "ended"


def test_a_step_that_fails_on_one_host_ends_all(hosts):
    leader, follower = hosts.together()
    hosts.open.remove(follower.close)
    exits = following(follower, loopback.RecordingRunner(failing=(0,)))
    runner = BroadcastRunner(loopback.RecordingRunner(), leader)
    runner.execute(loopback.step(0))
    runner.execute(loopback.step(1))
    leader.send(commands.Compile([]))  # anything but a recovery
    assert "step 0 has failed" in exits.ends.get(timeout=30)
    assert "step 0 has failed" in hosts.failures[0].get(timeout=30)


def test_an_address_of_another_machine_is_refused():
    cluster = Cluster(
        coordinator="192.0.2.1", port=loopback.free_port(), num_hosts=2, host_id=0, timeout_s=1, secret=loopback.SECRET
    )
    with pytest.raises(HostsError, match=r"cannot listen on 192\.0\.2\.1:\d+: .*of the host with --host-id 0"):
        Leader(cluster, lambda reason: None)


def test_the_secret_is_in_no_repr():
    cluster = loopback.Hosts().cluster
    assert loopback.SECRET not in repr(cluster)
    keys = leader_keys(loopback.SECRET)
    assert keys.secret.decode() not in repr(keys)
    assert keys != leader_keys(f"not {loopback.SECRET}")
    assert keys == leader_keys(loopback.SECRET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_id": 2}, "--host-id is from 0 to 1, not 2"),
        ({"num_hosts": 1}, "at least two hosts"),
        ({"port": 65534}, "the two after it must be below 65536"),
        ({"timeout_s": 0}, "--hosts-timeout must be above 0"),
        ({"secret": "short"}, "has 5 characters; 16 are the least"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(loopback.Hosts().cluster, **changes)
