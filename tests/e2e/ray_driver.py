"""Runs the Ray Serve application on this machine: ray_driver.py PORT KEY=VALUE... It ends when its input does."""

import os
import shutil
import sys
import tempfile

import ray
from ray import serve

from scripts.deploy.ray_serve_app import build

if __name__ == "__main__":
    port, *given = sys.argv[1:]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short paths
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=folder, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
        serve.run(build(dict(pair.split("=", 1) for pair in given)), route_prefix="/")
        print("ready", os.getpid(), flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)  # its processes may still write their last lines
