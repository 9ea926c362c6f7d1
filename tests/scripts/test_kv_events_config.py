"""`--kv-events-config` and `--prefix-caching-hash-algo`: what is accepted, what is refused and how."""

from __future__ import annotations

import json

import pytest

from scripts import launch
from scripts.building.runner import make_publisher
from scripts.flags.settings import EngineSettings
from server.engine.kv_event_stream import BlockHasher, HashAlgorithm

ON = {"enable_kv_cache_events": True}


def test_the_json_is_vllms():
    fields = {
        "publisher": "zmq", "endpoint": "tcp://*:5556", "replay_endpoint": "tcp://*:5559", "topic": "kv@a@b",
        "buffer_steps": 7, "hwm": 8, "max_queue_size": 9, "show_prompts_to_network": True,
    }  # fmt: skip
    for given in (ON | fields, json.dumps(ON | fields)):
        config = EngineSettings(kv_events_config=given).kv_events
        assert {name: getattr(config, name) for name in fields} == fields
    defaults = EngineSettings(kv_events_config=ON).kv_events
    assert (defaults.endpoint, defaults.replay_endpoint, defaults.topic) == ("tcp://127.0.0.1:5557", None, "")
    assert (defaults.buffer_steps, defaults.hwm, defaults.max_queue_size) == (10_000, 100_000, 100_000)


@pytest.mark.parametrize(
    "fields", [None, {}, {"enable_kv_cache_events": False, "publisher": "zmq"}, ON | {"publisher": "null"}]
)
def test_without_being_asked_nothing_is_published(fields):
    settings = EngineSettings(kv_events_config=fields)
    assert settings.kv_events is None
    assert make_publisher(settings, print) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("on", "is not JSON"),
        ("[" * 10_000, "is not JSON"),
        ("[3]", "is a JSON object such as"),
        (ON | {"topics": ""}, "unknown fields topics; there are enable_kv_cache_events, publisher, endpoint"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events"),
        (ON | {"publisher": "nats"}, "publisher"),
        (ON | {"endpoint": "5557"}, "endpoint '5557': write tcp://HOST:PORT"),
        (ON | {"endpoint": "tcp://*"}, "endpoint 'tcp://*': write"),
        (ON | {"endpoint": "tcp://*:65536"}, "endpoint 'tcp://*:65536': write"),
        (ON | {"replay_endpoint": "ipc://"}, "replay_endpoint 'ipc://': write"),
        (ON | {"endpoint": "tcp://*:5557"}, "endpoint 'tcp://*:5557' shows the tokens of all prompts"),
        (ON | {"endpoint": "tcp://10.0.0.1:5557"}, "endpoint 'tcp://10.0.0.1:5557' shows"),
        (ON | {"replay_endpoint": "tcp://0.0.0.0:5557"}, "replay_endpoint 'tcp://0.0.0.0:5557' shows"),
        (ON | {"max_queue_size": 0}, "max_queue_size"),
        (ON | {"hwm": -1}, "hwm"),
        (ON | {"buffer_steps": 2.5}, "buffer_steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(value, words):
    given = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError, match=r"^--kv-events-config") as raised:
        EngineSettings(kv_events_config=given)
    assert words in str(raised.value)


def test_events_need_a_prefix_cache():
    with pytest.raises(ValueError, match="--kv-events-config needs a prefix cache"):
        EngineSettings(kv_events_config=ON, enable_prefix_caching=False)


def test_flags_are_read(capsys):
    args = launch.parse(["--kv-events-config", json.dumps(ON), "--prefix-caching-hash-algo", "sha256"])
    assert args.compatibility_warnings == []
    settings = EngineSettings.from_namespace(args)
    assert settings.kv_events is not None and settings.prefix_caching_hash_algo == "sha256"
    with pytest.raises(SystemExit):
        launch.parse(["--prefix-caching-hash-algo", "xxhash"])
    assert "invalid choice: 'xxhash' (choose from" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="--prefix-caching-hash-algo 'xxhash_cbor': it can be one of sha256_cbor, sha256"
    ):
        EngineSettings(prefix_caching_hash_algo="xxhash_cbor")


def test_the_seed_is_vllms_variable(tmp_path):
    lines: list[str] = []
    endpoint = f"ipc://{tmp_path}/kv"
    settings = EngineSettings(kv_events_config=ON | {"endpoint": endpoint, "topic": "kv@a@b"})
    publisher = make_publisher(settings, lines.append, rank=1, environment={"PYTHONHASHSEED": "42"})
    assert publisher._hasher.root == BlockHasher(HashAlgorithm.SHA256_CBOR, "42").root
    publisher.close()
    make_publisher(settings, lines.append, environment={}).close()
    assert lines == [
        f"  kv events         {endpoint}_dp1, topic 'kv@a@b'",
        f"  kv events         {endpoint}, topic 'kv@a@b'; without PYTHONHASHSEED, the hashes are of this engine only",
    ]
