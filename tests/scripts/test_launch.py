"""The serving command's flags: what they are called, what they refuse, what they become."""

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from batcher.request import Targets
from batcher.step_times import PerTokenEstimate
from model.loading import hub
from model.loading.source import resolve
from scripts import launch
from scripts.building.limits import bucket_config, with_ceiling
from scripts.flags.lora import NamedWeights
from scripts.flags.serve import api_keys, tls_files
from scripts.flags.settings import EngineSettings, add_engine_flags
from scripts.lab import flag_table
from server.settings import GenerationDefaults, Settings, TlsFiles


def parse(*flags: str) -> argparse.Namespace:
    return launch.parse(flags)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("scripts.launch", {"jax", "transformers", "gguf"}),
        ("scripts.lab.check", {"jax", "transformers", "gguf"}),
        ("scripts.building.build, scripts.building.runner", {"transformers", "gguf"}),
    ],
    ids=["server", "check", "engine"],
)
def test_a_process_starts_without_what_takes_long_to_import(modules, absent):
    code = f"import sys, {modules}; print(*sorted({absent} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"


def test_no_flags_serve_the_demo_on_the_loopback():
    args = parse()
    assert (args.model, args.host, args.port) == ("demo", "127.0.0.1", 8000)
    assert EngineSettings.from_namespace(args) == EngineSettings()


def settings_of(*flags: str | Path) -> Settings:
    args = parse(*map(str, flags))
    return launch.server_settings(args, resolve(args.model), resolve(args.model).path)


def visible_flags():
    return [action for action in launch.parser()._actions if action.help is not argparse.SUPPRESS]


NUMBERS = [action for action in visible_flags() if action.type in (int, float) and action.choices is None]
WITH = {
    "--max-concurrent-per-key": ["--api-key", "k"],
    "--num-hosts": ["--coordinator", "a:1", "--host-id", "0"],
    "--host-id": ["--coordinator", "a:1", "--num-hosts", "2"],
    "--hosts-timeout": ["--coordinator", "a:1", "--num-hosts", "2", "--host-id", "0"],
}


@pytest.mark.parametrize("action", NUMBERS, ids=lambda action: action.dest)
def test_a_number_out_of_range_is_refused_by_the_name_of_its_flag(action, monkeypatch, capsys):
    monkeypatch.setenv("PALLAS_SERVE_HOSTS_SECRET", "0" * 64)
    flag = action.option_strings[0]
    wrong = ["-2", "nan"] if action.type is float else ["-2"]  # --max-model-len -1 is `auto`
    for value in wrong if flag != "--seed" else ():
        assert launch.main([f"{flag}={value}", "--device", "cpu", *WITH.get(flag, ())]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert flag in line and value in line and "self." not in line


def test_a_number_that_no_machine_has_is_refused_too(capsys):
    for flag in ("--max-num-seqs", "--max-num-batched-tokens", "--page-size", "--data-parallel-size", "--port"):
        assert launch.main([f"{flag}=1000000000000", "--device", "cpu"]) == 2
        assert f"{flag} must be at most" in capsys.readouterr().err
    assert launch.main("--device cpu --max-num-seqs 8 --max-num-batched-tokens 8".split()) == 2
    assert "--max-num-batched-tokens 8 must be above --max-num-seqs 8" in capsys.readouterr().err


def printed_help(capsys, *flags):
    with pytest.raises(SystemExit) as exit:
        launch.parser().parse_args(["--help", *flags])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_the_help_has_the_most_important_flags_and_names_the_groups(capsys):
    text = printed_help(capsys)
    assert "--tensor-parallel-size" in text and "--ssl-certfile" not in text
    assert len(text.splitlines()) < 60
    names = [line.split()[0] for line in text.rpartition("`--help GROUP`:")[2].splitlines() if line]
    *in_groups, everything = [printed_help(capsys, name) for name in names]
    assert sum("--ssl-certfile" in group for group in in_groups) == 1
    for flag in {flag for action in visible_flags() for flag in action.option_strings}:
        assert flag in everything


def test_the_tables_of_flags_in_the_documents_are_made_of_the_declarations():
    for document, text in flag_table.documents().items():
        assert document.read_text() == text, "run python -m scripts.lab flag_table"


def test_the_help_of_an_unknown_group_names_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        launch.parser().parse_args(["--help", "nonsense"])
    assert "--help nonsense: there are model, batching, device" in capsys.readouterr().err


def test_flags_of_vllm_mean_the_same_here():
    args = parse(
        *"--max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5".split(),
        *"--block-size 32 --num-gpu-blocks-override 99 --no-enable-prefix-caching --load-format dummy".split(),
        *"--dtype bfloat16 --tensor-parallel-size 2 --seed 3 --pipeline-depth 1 --step-timeout 60".split(),
    )
    assert EngineSettings.from_namespace(args) == EngineSettings(
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        memory_utilization=0.5,
        page_size=32,
        num_pages=99,
        enable_prefix_caching=False,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=2,
        seed=3,
        pipeline_depth=1,
        step_timeout=60.0,
    )


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], None),
        (["--spec-method", "ngram", "--spec-tokens", "3"], {"method": "ngram", "num_speculative_tokens": 3}),
        (
            ["--spec-method=eagle3", "--spec-model=a/b", "--spec-tokens=5"],
            {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 5},
        ),
    ],
)
def test_drafts_have_plain_flags_too(flags, config):
    found = EngineSettings.from_namespace(parse(*flags)).speculative_config
    assert (found and json.loads(found)) == config


@pytest.mark.parametrize(
    ("flags", "pooling"),
    [
        ([], None),
        (["--pooling-type", "mean"], None),
        (["--enable-embeddings"], "last"),
        (["--task", "embed", "--pooling-type", "mean"], "mean"),
        (["--runner", "pooling", "--convert", "none"], "last"),
        (["--convert", "embed"], "last"),
        (["--task", "generate"], None),
    ],
)
def test_embeddings_are_enabled_by_vllms_flags_too(flags, pooling):
    assert EngineSettings.from_namespace(parse(*flags)).pooling == pooling


@pytest.mark.parametrize(
    "flags", [["--beams", "2"], ["--max-model", "5"], ["--dtype", "int3"], ["--port", "x"], ["--step-budget", "time"]]
)
def test_unknown_flags_and_values_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory_utilization": 1.5}, "--memory-utilization"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"device": "gpu"}, "--device 'gpu'"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_path": "gs://bucket/pages"},
            "--kv-offloading-path 'gs://bucket/pages' is a URL, and this is read and written on this machine only",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_their_flag(settings, words):
    with pytest.raises(ValueError, match=words):
        EngineSettings(**settings)


def test_unknown_keywords_are_refused_by_name():
    with pytest.raises(ValueError, match="there is no --beams"):
        EngineSettings.from_keywords(beams=3)


def test_every_setting_has_its_flag():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    plain = {"spec_method", "spec_model", "spec_tokens"}  # fields of the speculative config, which is one setting
    assert vars(parser.parse_args([])).keys() == {field.name for field in dataclasses.fields(EngineSettings)} | plain


def test_the_curl_line_is_a_request(model_folder, tmp_path):
    settings = settings_of(
        "--served-model-name", "it's", "other", "--api-key", "sk-secret", "--model", str(model_folder)
    )
    assert "sk-secret" not in launch.curl_line("http://h:1", settings)
    words = shlex.split(launch.curl_line("http://h:1", settings).replace("\\\n", "").replace("'s", "_s"))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer $PALLAS_SERVE_API_KEY" in words
    line = launch.curl_line("http://h:1", settings)
    assert '"Authorization: Bearer $PALLAS_SERVE_API_KEY"' in line  # in quotes within which a shell puts the key
    assert json.loads(words[-1])["messages"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("flags", "address"), [((), "http://localhost"), (("--ssl-certfile", "c"), "https://localhost")]
)
def test_the_curl_line_of_a_unix_socket_has_its_scheme(model_folder, flags, address):
    settings = settings_of("--uds", "/run/a b", *flags, "--model", model_folder)
    words = shlex.split(launch.curl_line("unix:/run/a b", settings).replace("\\\n", ""))
    assert words[:4] == ["curl", "--unix-socket", "/run/a b", f"{address}/v1/chat/completions"]


def test_keys_come_from_flags_a_file_and_the_environment(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# whose they are\nsk-2\n\n  sk-3  \n")
    monkeypatch.setenv("PALLAS_SERVE_API_KEY", "sk-4")
    assert api_keys(parse("--api-key", "sk-1", "--api-key-file", str(file))) == ("sk-1", "sk-2", "sk-3", "sk-4")
    monkeypatch.delenv("PALLAS_SERVE_API_KEY")
    assert api_keys(parse()) == ()
    monkeypatch.setenv("PALLAS_SERVE_API_KEY", " ")
    with pytest.raises(ValueError, match="PALLAS_SERVE_API_KEY is set and holds no key"):
        api_keys(parse())


def test_vllms_variable_is_the_default_of_the_key(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    with caplog.at_level("INFO", logger="pallas_serve"):
        assert api_keys(parse()) == ("sk-secret",)
        assert api_keys(parse("--api-key", "sk-1")) == ("sk-1",)
    assert [record.getMessage() for record in caplog.records] == [
        "requests need the key of the environment variable VLLM_API_KEY"
    ]
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ValueError, match="VLLM_API_KEY is set and holds no key"):
        api_keys(parse())


def test_connection_flags_are_settings(model_folder):
    flags = ["--max-connections", "9", "--head-timeout", "1", "--body-timeout", "2", "--idle-timeout", "3"]
    settings = settings_of("--model", model_folder, *flags)
    assert (settings.max_connections, settings.head_timeout_s) == (9, 1)
    assert (settings.body_timeout_s, settings.idle_timeout_s, settings.send_timeout_s) == (2, 3, 300)


def test_flags_of_tls_are_vllms():
    files = ["--ssl-certfile", "/c", "--ssl-keyfile", "/k", "--ssl-ca-certs", "/a", "--ssl-cert-reqs", "2"]
    ciphers = ("--ssl-ciphers", "ECDHE+AESGCM")
    assert tls_files(parse(*files, *ciphers, "--enable-ssl-refresh")) == TlsFiles(
        certfile=Path("/c"), keyfile=Path("/k"), ca_certs=Path("/a"), cert_reqs=2, ciphers=ciphers[1], refresh=True
    )
    assert tls_files(parse()) is None
    with pytest.raises(ValueError, match="--enable-ssl-refresh has no effect without --ssl-certfile"):
        tls_files(parse("--enable-ssl-refresh"))


def test_server_settings_come_from_flags_and_checkpoint(model_folder, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    settings = settings_of("--model", model_folder, "--chat-template", template, "--metrics-prefix", "vllm:")
    assert settings.model_names == (str(model_folder),)
    assert settings.chat_template == "{{ messages }}"
    assert settings.metrics_prefix == "vllm:"
    assert settings.tokenizer_folder == model_folder
    assert settings.version == launch.version()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no/such/model/here"], "no model 'no/such/model/here'"),
        (["--model", "preset:llama-9"], "unknown preset"),
        (["--chat-template", "/nonexistent.jinja"], "nonexistent"),
        (["--api-key-file", "/nonexistent.keys"], "nonexistent"),
        (["--api-key-file", "/dev/null"], "--api-key-file /dev/null: there is no key in it"),
        (["--spec-tokens", "3"], "--speculative-config has no method; there are"),
        (["--spec-method", "ngram"], "num_speculative_tokens"),
        (["--api-key", "a "], "an API key begins or ends"),
        (["--lora-modules", "a=b"], "--lora-modules needs --enable-lora"),
        (["--lora-folder", "."], "--lora-folder needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "--lora-modules 'a': write NAME=PATH"),
        (["--enable-lora", "--lora-modules", "=b"], "--lora-modules: a name has 1 to 256 printable characters"),
        (["--enable-lora", "--lora-modules", "a\nb=c"], "printable"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "two adapters have the name 'a'"),
        (["--enable-lora", "--lora-modules", "a="], "the adapter 'a' has no path"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "missing required field `path`"),
        (["--enable-lora", "--lora-modules", "[" * 100_000], "--lora-modules"),
        (["--enable-lora", "--lora-modules", "demo=b"], "'demo' is the name of the model"),
        (["--enable-lora", "--lora-folder", "/no/such/folder"], "--lora-folder /no/such/folder: there is no such"),
        (["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "3"], "--max-cpu-loras 3 must be at least"),
        (["--enable-lora", "--max-lora-rank", "513"], "--max-lora-rank must be at most 512"),
        (["--models", "a"], "--models 'a': write NAME=PATH, or a JSON object with paths by their names"),
        (["--models", "=b"], "--models: a name has 1 to 256 printable characters"),
        (["--models", "a=b", '{"a": "c"}'], "--models: two models have the name 'a'"),
        (["--models", "a="], "--models: the model 'a' has no path"),
        (["--models", '{"a": 3}'], "--models"),
        (["--models", "demo=b"], "--models: 'demo' is the name of the model"),
        (["--models", "a=b", "--enable-lora", "--lora-modules", "a=c"], "'a' is the name of a model (--models)"),
        (["--models-folder", "/no/such/folder"], "--models-folder /no/such/folder: there is no such"),
        (["--max-resident-models", "2"], "--max-resident-models needs --models or --models-folder"),
        (["--models-host-memory", "2"], "--models-host-memory needs --models or --models-folder"),
        (["--models", "a=b", "--max-resident-models", "0"], "--max-resident-models must be at least 2"),
        (["--kv-offloading-path", "/pages"], "--kv-offloading-path needs --kv-offloading-size"),
    ],
)
def test_a_start_that_cannot_be_says_so_in_one_line(flags, words, capsys):
    assert launch.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("scripts/serve: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_model_may_come_first():
    assert launch.parse(["folder", "--port", "1"]).model == "folder"
    assert launch.parse(["--port", "1"]).model == "demo"
    assert launch.parse(["a", "--model", "a"]).model == "a"
    with pytest.raises(ValueError, match="two models are named: a and --model b"):
        launch.parse(["a", "--model", "b"])


def test_adapters_of_the_start_have_vllms_forms(tmp_path):
    flags = [
        "--enable-lora",
        "--lora-modules",
        "a=/x=y",
        '{"name": "b", "path": "memory://b/c", "base_model_name": "base"}',
    ]
    flags += ["--max-loras", "2", "--lora-modules", '[{"name": "c", "path": "z"}, {"name": "d", "path": "z"}]']
    settings = EngineSettings.from_namespace(launch.parse([*flags, "--lora-folder", str(tmp_path)]))
    assert settings.adapters == [
        NamedWeights("a", "/x=y"),
        NamedWeights("b", "memory://b/c", "base"),
        NamedWeights("c", "z"),
        NamedWeights("d", "z"),
    ]
    assert (settings.max_loras, settings.max_lora_rank, settings.lora_folder) == (2, 16, tmp_path)
    assert EngineSettings.from_namespace(launch.parse([])).adapters == []


def test_models_of_the_start_are_named_by_flags_by_a_file_and_by_python(tmp_path):
    file = tmp_path / "config.yaml"
    named = [NamedWeights("a", "/x=y"), NamedWeights("b", "memory://b/c")]
    for lines in ("models: [a=/x=y, 'b=memory://b/c']", "models: {a: /x=y, b: 'memory://b/c'}"):
        file.write_text(lines)
        assert EngineSettings.from_namespace(launch.parse(["--config", str(file)])).named_models == named
    flags = ["--models", "a=/x=y", '{"b": "memory://b/c"}', "--models-folder", str(tmp_path)]
    settings = EngineSettings.from_namespace(launch.parse([*flags, "--max-resident-models", "3"]))
    assert (settings.named_models, settings.models_folder, settings.max_resident_models) == (named, tmp_path, 3)
    assert EngineSettings.from_keywords(models={"a": "/x=y", "b": "memory://b/c"}).named_models == named
    assert EngineSettings.from_keywords(models_folder=str(tmp_path)).has_models
    none = EngineSettings()
    assert (none.named_models, none.has_models) == ([], False)


def test_revisions_are_those_of_the_hub(monkeypatch, model_folder, capsys):
    asked, started = [], []

    def snapshot_download(name, *, revision, **patterns):
        asked.append((name, revision))
        return str(model_folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(launch, "run", lambda settings, engine, served, **options: started.append(served) or 0)
    common = ["--load-format", "dummy", "--device", "cpu"]
    assert launch.main(["o/m", "--revision", "v1", "--tokenizer", "o/t", "--tokenizer-revision", "v2", *common]) == 0
    assert launch.main(["o/m", "--tokenizer-revision", "v3", *common]) == 0
    assert asked == [("o/m", "v1"), ("o/t", "v2"), ("o/m", None), ("o/m", "v3")]
    (first, _) = started
    assert (first.engine.model, first.engine.revision, first.tokenizer) == (str(model_folder), None, model_folder)
    for flag, value in (("--revision", "v1"), ("--tokenizer-revision", "v2")):
        assert launch.main([str(model_folder), flag, value, *common]) == 2
        assert f"is for hub {'models' if flag == '--revision' else 'names'} only: revision={value!r}" in (
            capsys.readouterr().err
        )
    EngineSettings.from_keywords(model="o/m", revision="v4", load_format="dummy").source()
    assert asked[-1] == ("o/m", "v4")


def test_short_names_of_vllm():
    args = parse("-tp", "2", "-dp", "3", "-q", "int8", "-O3")
    assert (args.tensor_parallel_size, args.data_parallel_size, args.quantization) == (2, 3, "int8")


def test_a_configuration_file_comes_before_the_command_line(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "max-model-len: 512\nserved_model_name: [a, b]\nstrict_fields: true\nenable-prefix-caching: false\n"
        "enable-auto-tool-choice: false\nenable-chunked-prefill: false\nenable-ssl-refresh: false\n"
        "api-key-all-routes: false\nmetrics-prefix: 'vllm:'\nseed:\nport: 9\nui: false\n"
    )
    args = launch.parse(["folder", "--config", str(file), "--port", "7"])
    assert (args.model, args.max_model_len, args.served_model_name) == ("folder", 512, ["a", "b"])
    assert (args.strict_fields, args.enable_prefix_caching, args.api_key_all_routes) == (True, False, False)
    assert (args.metrics_prefix, args.seed, args.port) == ("vllm:", None, 7)
    assert (args.enable_auto_tool_choice, args.enable_ssl_refresh, args.ui) == (False, False, False)
    assert launch.parse([f"--config={file}"]).port == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "must hold `flag: value` lines"),
        ("config: other.yaml", "names another file"),
    ],
)
def test_configuration_files_that_cannot_be_read(tmp_path, text, words, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert launch.main(["--config", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_configuration_file_must_be_named_and_be_there(capsys):
    assert launch.main(["--config"]) == 2
    assert launch.main(["--config", "/nowhere.yaml"]) == 2
    assert launch.main(["--config", "a", "--config", "b"]) == 2


def test_defaults_of_generation_are_overridden(model_folder):
    defaults = settings_of(
        "--model", model_folder, "--override-generation-config", '{"temperature": 0.25, "top_k": 7}'
    ).generation_defaults
    assert (defaults.temperature, defaults.top_k) == (0.25, 7)
    for text, words in (("{", "override"), ('{"beams": 1}', "unknown fields beams"), ('{"top_p": 2}', "top_p")):
        with pytest.raises(ValueError, match=words):
            settings_of("--model", model_folder, "--override-generation-config", text)


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ([], None),
        (["--max-output-tokens", "7"], 7),
        (["--max-output-tokens", "7", "--override-generation-config", '{"max_new_tokens": 5}'], 5),
        (["--max-output-tokens", "7", "--override-generation-config", '{"max_new_tokens": 9}'], 7),
    ],
)
def test_the_smaller_of_two_limits_of_the_output_counts(model_folder, flags, most):
    settings = settings_of("--model", model_folder, *flags)
    assert settings.generation_defaults.max_new_tokens == most
    with pytest.raises(ValueError, match="--max-output-tokens must be at least 1"):
        settings_of("--max-output-tokens", "0")


def test_the_folder_of_batches_has_a_size(model_folder, tmp_path):
    settings = settings_of("--batch-folder", tmp_path, "--batch-folder-size", "0.5", "--batch-concurrency", "8")
    assert (settings.batch_folder, settings.batch_folder_gib, settings.batch_concurrency) == (tmp_path, 0.5, 8)
    for flag, wrong in (("--batch-folder-size", "0"), ("--batch-folder-size", "nan"), ("--batch-concurrency", "0")):
        with pytest.raises(ValueError, match=flag):
            settings_of(flag, wrong)


@pytest.mark.parametrize(
    ("flags", "concurrency"),
    [
        ([], 64),
        (["--max-queue", "32"], 16),
        (["--max-queue", "0"], 1),
        (["--max-queue", "9", "--batch-concurrency", "9"], 9),
    ],
)
def test_batches_leave_room_in_the_queue(model_folder, tmp_path, flags, concurrency):
    def settings(*flags: str):
        return settings_of("--batch-folder", tmp_path, *flags)

    assert settings(*flags).batch_concurrency == concurrency
    with pytest.raises(ValueError, match="--max-queue 9: choose fewer"):
        settings("--max-queue", "9", "--batch-concurrency", "10")


def test_defaults_of_generation_come_from_the_model_or_elsewhere(model_folder, tmp_path):
    def temperature(*flags: str) -> float:
        return settings_of("--model", model_folder, *flags).generation_defaults.temperature

    (tmp_path / "generation_config.json").write_text('{"temperature": 0.125}')
    assert temperature("--generation-config", str(tmp_path)) == 0.125
    assert temperature("--generation-config", "auto") == temperature()
    assert temperature("--generation-config", "vllm") == GenerationDefaults().temperature
    for folder, words in (
        (str(tmp_path / "none"), "no generation_config.json"),
        ("nope://a/b", "no package of fsspec"),
    ):
        with pytest.raises(ValueError, match=words):
            temperature("--generation-config", folder)


def test_usage_in_all_streams_is_a_setting(model_folder):
    assert settings_of("--model", model_folder, "--enable-force-include-usage").enable_force_include_usage


@pytest.mark.parametrize(
    ("flags", "platform", "rows", "why"),
    [
        ({"target_itl": 10}, "gpu", 16, "their decode takes 9.6 ms"),  # 8 ms, and a tenth for each row
        ({"target_itl": 50}, "gpu", 256, "their decode takes 33.6 ms"),
        ({"target_itl": 1}, "tpu", 8, "their decode takes 8.8 ms"),
        ({"target_ttft": 10}, "gpu", None, "the default"),
        ({"target_itl": 10}, "cpu", None, "the default"),
        ({"target_itl": 10, "max_num_seqs": 100}, "gpu", 100, "--max-num-seqs"),
    ],
)
def test_the_most_rows_are_those_whose_decode_keeps_the_target(flags, platform, rows, why):
    settings = EngineSettings(**flags)
    buckets = bucket_config(settings, platform, 4)
    found, reason = with_ceiling(settings, platform, buckets, PerTokenEstimate(0.008, 1e-4))
    assert found.max_num_seqs == rows
    assert reason.startswith(why)


def test_targets_are_in_milliseconds_and_a_percentage():
    settings = EngineSettings.from_namespace(parse("--target-itl", "50", "--target-percentile", "95"))
    assert settings.targets == Targets(itl_ms=50, percentile=0.95)
    assert EngineSettings.from_namespace(parse()).targets is None
