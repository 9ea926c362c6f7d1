"""The parts that benches of several rows and rounds share: their model, a server's counters, and ratios of rounds."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import psutil
import pytest

from scripts.lab.load.client import Outcome, Target
from scripts.lab.load.measured import Measured, ratio_of_rounds
from scripts.lab.load.servers import Server


def of_tokens(count: int, seconds: float, **counts: float) -> Measured:
    outcome = Outcome(start=0.0, chunk_times=[1.0, 1.5], end=2.0, completion_tokens=count)
    return Measured(outcomes=[outcome], visits=[], seconds=seconds, foreign_cores=seconds, counts=counts)


def test_a_ratio_has_the_least_and_the_greatest_of_a_round():
    above, below = [of_tokens(30, 1.0), of_tokens(30, 3.0)], [of_tokens(10, 1.0), of_tokens(10, 1.0)]
    line = ratio_of_rounds("a / b", "output tokens/s", above, below)
    assert line == "a / b (output tokens/s): 1.500 (1.000 to 3.000 in 2 rounds)"
    assert ratio_of_rounds("a / b", "TTFT p50", above, below).endswith(": 1.000 (1.000 to 1.000 in 2 rounds)")


METRICS = """# TYPE pallas_serve:kv_offload_pages gauge
pallas_serve:kv_offload_pages{engine="0",tier="host"} 3.0
pallas_serve:kv_offload_pages{engine="1",tier="host"} 4.0
pallas_serve:kv_offload_pages{engine="0",tier="disk"} 5.0
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0"} 16.0
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_counters_are_summed_over_engines_and_not_over_tiers(url):
    found = Server(Target(base_url=url, model="m"), psutil.Process()).counters()
    assert found["kv_offload_pages host"] == 7
    assert found["kv_offload_pages disk"] == 5
    assert found["external_prefix_cache_hits_total"] == 16
    assert found["another"] == 0
