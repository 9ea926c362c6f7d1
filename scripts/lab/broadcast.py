"""Microseconds that the broadcast of a step costs the leader, and bytes: python -m scripts.lab broadcast.

The followers are processes on this machine that receive the steps and run none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np

from batcher.step import PATCH_BLOCK, Bucket, PackedLayout, StepInput, Variant
from scripts.lab.tables import Table, say, say_head
from server.engine.hosts.cluster import Cluster
from server.engine.hosts.commands import Stop, step_to_wire
from server.engine.hosts.follower import Follower
from server.engine.hosts.leader import Leader

STEPS = {
    "decode of 64 rows": (Bucket(64, 64, Variant.GREEDY), 0),
    "decode of 256 rows": (Bucket(256, 256, Variant.GREEDY), 0),
    "mixed, 2048 tokens of 256 rows": (Bucket(2048, 256, Variant.SAMPLE), 0),
    "the same, and two blocks of patches": (Bucket(2048, 256, Variant.SAMPLE), 2),
}


def main(argv: list[str] | None = None) -> int:
    """Prints a row for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--followers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args(argv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1] - 2
    cluster = Cluster(
        coordinator="127.0.0.1", port=port, num_hosts=1 + args.followers, host_id=0, timeout_s=60, secret="x" * 32
    )
    context = multiprocessing.get_context("spawn")
    numbers = range(1, 1 + args.followers)
    followers = [context.Process(target=follow, args=(replace(cluster, host_id=number),)) for number in numbers]
    for follower in followers:
        follower.start()
    leader = Leader(cluster, sys.exit)
    leader.gather({}, print)
    say_head()
    table = Table({"": "<36", "bytes": "7", "median us": "7.0f", "p99 us": "7.0f", "followers": "7"}, say)
    for name, (bucket, num_patches) in STEPS.items():
        packed = np.random.default_rng(0).integers(1 << 17, size=PackedLayout(bucket).size, dtype=np.int32)
        patches = tuple(np.zeros((2, PATCH_BLOCK), np.int32) for _ in range(num_patches))
        step = StepInput(bucket=bucket, packed=packed, patches=patches)
        size = len(msgspec.msgpack.encode(step_to_wire(step)))
        seconds = []
        for _ in range(args.steps):
            started = time.perf_counter()
            leader.send(step_to_wire(step))
            seconds.append(time.perf_counter() - started)
            time.sleep(0.0005)  # a step's time: the device computes, and ZeroMQ's thread sends
        median, high = np.percentile(seconds, (50, 99)) * 1e6
        table.row(name, size, median, high, args.followers)
    leader.stop()
    for follower in followers:
        follower.join()
    return 0


def follow(cluster: Cluster) -> None:
    """Receives until the leader stops."""
    follower = Follower(cluster, sys.exit)
    follower.arrive({}, lambda line: None)
    while not isinstance(follower.next_command(), Stop):
        pass
    follower.close()
