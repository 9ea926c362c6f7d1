"""Command lines and keywords as they are pasted: what becomes of each flag of vLLM's, and of the forms of values."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from batcher.request import MAX_LOGPROBS
from model.loading.source import resolve
from scripts import launch
from scripts.building.weights import choose_weights
from scripts.flags import compatibility
from scripts.flags.parsing import parse_flags
from scripts.flags.settings import EngineSettings
from tests.model.loading.test_packed_checkpoints import FORMATS, write

HERE = Path(__file__).parent
VLLM = (HERE / "vllm_flags.txt").read_text().split()  # of 0.33; the endings are those of the table
LINES = [(of, *line) for of, lines in tomllib.loads((HERE / "pasted_lines.toml").read_text()).items() for line in lines]
PARSER = launch.parser()
NARGS = compatibility.SERVED | compatibility.UNSERVED


def refusal(*argv: str) -> None:
    with pytest.raises(SystemExit) as refused:
        launch.parse(argv)
    assert refused.value.code == 2


def test_the_table_has_every_flag_of_vllm_once_and_in_its_form():
    listed = [*compatibility.SERVED, *compatibility.WITHOUT_EFFECT, *compatibility.REFUSED]
    assert len(listed) == len(set(listed)) == len(NARGS)
    kinds = {flag.rstrip("=+?"): {"=": None, "+": "+", "?": "?"}.get(flag[-1], 0) for flag in VLLM}
    assert len(kinds) == len(VLLM) == 344
    assert {flag: NARGS.get(flag, "missing") for flag in kinds} == kinds
    assert {entry["flag"] for entry in compatibility.TABLE["values"]} | compatibility.TABLE[
        "harmless"
    ].keys() <= NARGS.keys()
    assert f"at most {MAX_LOGPROBS};" in compatibility.WITHOUT_EFFECT["--max-logprobs"]


def words_of(flag: str) -> list[str]:
    return [flag] if NARGS[flag] == 0 else [flag, "value"]


def test_served_flags_are_ours():
    actions = PARSER._option_string_actions
    assert [flag for flag in compatibility.SERVED if (actions[flag].nargs == 0) != (NARGS[flag] == 0)] == []


def test_flags_without_a_meaning_are_taken_with_a_line_each_in_the_log(caplog):
    args = launch.parse(["folder", *(word for flag in compatibility.WITHOUT_EFFECT for word in words_of(flag))])
    told = [f"{flag} has no effect: {reason}" for flag, reason in compatibility.WITHOUT_EFFECT.items()]
    assert args.compatibility_warnings == told
    assert EngineSettings.from_namespace(args) == EngineSettings.from_namespace(args) == EngineSettings(model="folder")
    assert [record.getMessage() for record in caplog.records] == told


@pytest.mark.parametrize("flag", compatibility.REFUSED)
def test_a_flag_that_cannot_be_served_is_refused_in_words(flag, capsys):
    with pytest.raises(SystemExit) as refused:
        parse_flags(PARSER, words_of(flag))
    assert refused.value.code == 2
    assert f"{flag}: {compatibility.REFUSED[flag]}" in " ".join(capsys.readouterr().err.split())
    if NARGS[flag] is None:  # a value that asks for nothing
        assert parse_flags(PARSER, [flag, "{}"]).compatibility_warnings == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes", "1"], ["-pp=1"], ["--data-parallel-start-rank", "0"], ["--kv-offloading-backend=native"],
        ["--hf-overrides", "{}"], ["--revision", "main"], ["--allowed-methods", '["*"]'], ["--runner", "auto"],
        ["--no-skip-tokenizer-init"], ["--headless=false"], ["--no-enable-expert-parallel"], ["--disable-dbo"],
        ["--weight-transfer-config.backend", "ipc"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_that_change_nothing_are_taken(flags):
    assert launch.parse(flags).compatibility_warnings == []


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--max_model_len 512 --max_num_seqs=8", {"max_model_len": 512, "max_num_seqs": 8}),
        ("--max-model-len 16k", {"max_model_len": 16_000}),
        ("--max-model-len=32K", {"max_model_len": 32_768}),
        ("--max-model-len 25.6k", {"max_model_len": 25_600}),
        ("--max-num-batched-tokens 1M", {"max_num_batched_tokens": 2**20}),
        ("--max-model-len 512 --max-model-len auto", {"max_model_len": 512}),
        ("--max-model-len -1", {"max_model_len": None}),
        ("--enable-lora=True --max_loras 4", {"enable_lora": True, "max_loras": 4}),
        ("--enable-lora --no-enable-lora", {"enable_lora": False}),
        ("--enable-lora --disable-lora", {"enable_lora": False}),
        ("--enable_prefix_caching False", {"enable_prefix_caching": False}),
        ("--disable-prefix-caching --enable-prefix-caching=true", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching=false", {"enable_prefix_caching": True}),
        ("-sc.method ngram -sc.num_speculative_tokens=3", {"speculative_config": json.dumps(DRAFTS)}),
        ("--speculative_config.method ngram --speculative-config.num_speculative_tokens 3",
         {"speculative_config": json.dumps(DRAFTS)}),
        ("-sc.method ngram --spec-tokens 3", {"speculative_config": json.dumps(DRAFTS)}),
        ("-q gptq_marlin", {"quantization": "gptq", "weight_form": None}),
        ("--dtype float --quantization awq_marlin", {"dtype": "float32", "quantization": "awq", "weight_form": None}),
        ("--dtype BFLOAT16 -q int8", {"dtype": "bfloat16", "quantization": "int8", "weight_form": "int8"}),
        ("--device-memory-utilization 0.5 --max-num-queued-reqs 7", {"memory_utilization": 0.5, "max_queue": 7}),
        ("--quantization None --seed=None --dtype auto", {"quantization": None, "seed": None, "dtype": "auto"}),
        ("--task embed", {"enable_embeddings": True}),
        ("--runner pooling --convert embed", {"enable_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_forms_of_values(flags, settings):
    found = EngineSettings.from_namespace(launch.parse(shlex.split(flags)))
    assert {name: getattr(found, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-num-sequences 4", "there is no --max-num-sequences; the nearest is --max-num-seqs"),
        ("--tensor_paralel_size 2", "there is no --tensor_paralel_size; the nearest is --tensor-parallel-size"),
        ("--max-model-len 16x", "--max-model-len: invalid int value: '16x'"),
        ("--enable-lora=maybe", "ignored explicit argument 'maybe'"),
        ("a b", "unrecognized arguments: b"),
        ("--speculative-config {} --speculative-config.method ngram", "give one form only"),
        ("--hf-overrides.rope_theta 1e6", "--hf-overrides: the checkpoint's config is served as it is"),
        ("--task classify", "--task: text is generated (auto, generate)"),
        ("--runner pooling --convert classify", "requests classify by `logprob_token_ids`"),
        ("--worker-extension-cls a.B", "which has /update_weights; in Python there is `LLM(worker_extension_cls=...)`"),
        ("--quantization bitsandbytes", "--quantization bitsandbytes: int8, fp8 and int4 are made here"),
        ("--load-format=bitsandbytes", "--quantization int4 keeps them in 4 bits"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: fp8 (e4m3) and int8 take a byte"),
        ("--quantization unknown", "invalid choice: 'unknown' (choose from"),
        ("--max-model-len", "--max-model-len: expected one argument"),
    ],
)
def test_what_is_wrong_is_refused_in_words(flags, words, capsys):
    refusal(*shlex.split(flags))
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dtype half", "--dtype half: nothing is computed in float16"),
        ("--attention-backend FLASHINFER", "--attention-backend FLASHINFER: it is a kernel of vLLM's"),
        ("--load-format runai_streamer", "--load-format runai_streamer: the form of the weights is found"),
        ("--kv-transfer-config.kv_connector LMCacheConnectorV1", "--kv-offloading-size GIB keeps them"),
    ],
)
def test_a_value_that_is_replaced_is_told(flags, words):
    args = launch.parse(shlex.split(flags))
    (warning,) = args.compatibility_warnings
    assert words in warning
    settings = EngineSettings.from_namespace(args)
    assert (settings.dtype, settings.attention_backend, settings.load_format) == ("auto", "auto", "auto")


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line[0]}: {line[1][:60]}")
def test_a_line_of_another_project_is_taken_or_refused_with_advice(line, capsys):
    _, text, *advice = line
    try:
        EngineSettings.from_namespace(launch.parse(shlex.split(text)))
    except (SystemExit, ValueError) as error:
        said = " ".join(capsys.readouterr().err.split()) + str(error)
        assert advice and advice[0] in said
    else:
        assert not advice


@pytest.mark.parametrize(
    "program", ["vllm serve", "serve", "python -m vllm.entrypoints.openai.api_server", "/opt/venv/bin/vllm serve"]
)
def test_a_line_may_begin_with_the_name_of_vllms_program(program):
    assert launch.parse([*program.split(), "a/b", "--port", "1"]).model == "a/b"
    assert launch.parse([*program.split(), "--model", "a/b"]).model == "a/b"
    assert launch.parse(["--device", "cpu", *program.split(), "a/b"]).model == "a/b"  # as scripts/serve does
    assert launch.parse(["serve"]).model == "serve"  # a model of that name is not the demo


def test_the_configuration_file_has_the_same_forms(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "max_model_len: 32K\nspeculative-config: {method: ngram, num_speculative_tokens: 3}\nenable-lora: false\n"
        "lora-modules: [{name: a, path: b}]\ntrust-remote-code: true\ndebug: false\nmax-num-seqs: 4\n"
    )
    args = launch.parse(["m", "--config", str(file), "--max_num_seqs", "8"])
    assert (args.max_model_len, args.enable_lora, args.max_num_seqs, args.debug) == (32_768, False, 8, False)
    assert json.loads(args.speculative_config) == DRAFTS
    assert args.lora_modules == ['{"name": "a", "path": "b"}']
    assert len(args.compatibility_warnings) == 1


def test_keywords_go_through_the_same_table(caplog):
    settings = EngineSettings.from_keywords(
        model="m", gpu_memory_utilization=0.5, max_model_len="16k", dtype="half", enforce_eager=True, max_num_seqs=4,
        trust_remote_code=False, hf_overrides={}, seed=None, speculative_config=DRAFTS, block_size=32,
        enable_prefix_caching=False, limit_mm_per_prompt={"image": 2}, quantization=None, logprobs_mode="raw_logits",
        lora_modules=[{"name": "a", "path": "b"}], enable_lora=True, enable_sleep_mode=False, tensor_parallel_size=2,
    )  # fmt: skip
    assert settings == EngineSettings(
        model="m", memory_utilization=0.5, max_model_len=16_000, max_num_seqs=4, speculative_config=DRAFTS,
        page_size=32, enable_prefix_caching=False, logprobs_mode="raw_logits", enable_lora=True,
        lora_modules=[{"name": "a", "path": "b"}], tensor_parallel_size=2,
    )  # fmt: skip
    told = [record.getMessage().split()[0] for record in caplog.records]
    assert told == ["--dtype", "--enforce-eager", "--limit-mm-per-prompt"]
    for wrong, words in (
        ({"max_num_sequences": 4}, "there is no --max-num-sequences; the nearest is --max-num-seqs"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size: a model is shared by heads only"),
        ({"hf_overrides": lambda config: config}, "hf-overrides must be a value or a list of them"),
        ({"dtype": "int3"}, "--dtype"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            EngineSettings.from_keywords(**wrong)


def test_values_of_the_table_are_flags_of_ours():
    for entry in compatibility.TABLE["values"]:
        if entry.get("as"):
            launch.parse(entry["as"])
    assert compatibility.translated("--dtype", "bfloat16") is None


def test_vllms_variables_are_read_or_named():
    environment = {"VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    assert list(compatibility.unread_variables(environment)) == []
    (line,) = compatibility.unread_variables(
        environment | {"VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_HOST_IP": "10.0.0.1"}
    )
    assert line.startswith("variables without effect here: VLLM_HOST_IP, VLLM_PORT; ")
    assert compatibility.log_level(launch.parse([]).log_level, environment) == "DEBUG"
    assert compatibility.log_level(launch.parse(["--log-level", "WARNING"]).log_level, environment) == "WARNING"
    assert compatibility.log_level(launch.parse(["--log-level", "CRITICAL"]).log_level, {}) == "ERROR"
    assert compatibility.log_level(launch.parse([]).log_level, {}) == "INFO"
    with pytest.raises(ValueError, match="VLLM_LOGGING_LEVEL can be one of debug, info"):
        compatibility.log_level(launch.parse([]).log_level, {"VLLM_LOGGING_LEVEL": "loud"})


def test_the_time_after_sigterm_and_the_documents_are_settings(model_folder):
    args = launch.parse(["--model", str(model_folder), "--shutdown-timeout", "0", "--disable-fastapi-docs"])
    settings = launch.server_settings(args, resolve(args.model), model_folder)
    assert (settings.grace_period_s, settings.disable_fastapi_docs) == (0, True)
    args = launch.parse(["--model", str(model_folder), "--allowed-origins", '["https://a.example"]'])
    assert launch.server_settings(args, resolve(args.model), model_folder).allowed_origins == ["https://a.example"]


def test_a_method_says_how_the_checkpoint_is_stored(tmp_path):
    write(tmp_path / "awq", FORMATS["awq"])

    def form(model: str, *flags: str):
        settings = EngineSettings.from_namespace(launch.parse([model, *flags]))
        return choose_weights(settings, "cpu").quantization

    stored = str(tmp_path / "awq")
    assert form(stored, "-q", "awq") == form(stored, "-q", "awq_marlin") == form(stored) is not None
    assert form(stored, "-q", "int8") != form(stored, "-q", "int4")
    with pytest.raises(ValueError, match="--quantization gptq: the checkpoint is awq"):
        form(stored, "-q", "gptq_marlin")
    with pytest.raises(ValueError, match="--quantization awq: the checkpoint is not quantised"):
        form("demo", "-q", "awq")
