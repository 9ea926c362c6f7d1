"""What is written for vLLM's engines, with no change but the import: TRL's and OpenRLHF's calls, streams, beams."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from multiprocessing.connection import Client, Listener

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from packaging import version

import scripts.llm as vllm
from batcher.request import Pooling
from scripts.lab.demo.export import hf_tensors
from scripts.llm import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams, TokensPrompt
from scripts.offline.worker import check_alone, worker_class
from tests.conftest import COMPILED
from tests.model.driver import dense_logits
from tests.model.loaded import flat
from tests.scripts.test_llm_training import CONFIG, PROMPT, folder, model_of  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def engine(folder):  # noqa: F811
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 16, "num_pages": 24}
    of_trl = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "model_impl": "auto", "quantization": None}
    of_openrlhf = {"enforce_eager": False, "distributed_executor_backend": "uni", "dtype": "float32", "max_logprobs": 1}
    both = {"enable_sleep_mode": True, "seed": 1, "logprobs_mode": "processed_logprobs", "trust_remote_code": True}
    keywords = of_trl | of_openrlhf | both | limits | {"enable_prefix_caching": True}
    keywords["worker_extension_cls"] = f"{__name__}.Extension"
    args = vllm.AsyncEngineArgs(model=str(folder), device="cpu", compile_cache=str(COMPILED), **keywords)
    engine = vllm.AsyncLLMEngine.from_engine_args(args)
    yield engine
    engine.shutdown()


@pytest.fixture
def llm(engine):
    return engine.llm


class Extension:
    """The methods of OpenRLHF's class, which gets arrays from a socket in place of a group of processes."""

    def init_process_group(self, address, port, rank_offset, world_size, name, backend="nccl", use_ray=False):
        self._group = Client((address, port))
        return self.rank + rank_offset

    def update_weight(self, name, dtype, shape, empty_cache=False):
        weight = np.frombuffer(self._group.recv_bytes(), dtype).reshape(shape)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def update_weight_cuda_ipc(self, name, dtype, shape, ipc_handles=None, empty_cache=False):
        rebuild, args = ipc_handles["here"]
        self.model_runner.model.load_weights(weights=[(name, rebuild(*args))])


def scores(seed: int, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """f64[n, V], the log-probabilities after each of the ids, without the engine."""
    logits = np.asarray(dense_logits(model_of(seed), ids), np.float64) / temperature
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def extension_method(worker, name: str, array: object) -> str:
    worker.model_runner.model.load_weights(weights=[(name, array)])
    return name


def test_trl_syncs_weights_and_reads_ranked_log_probabilities(llm):
    worker = llm.llm_engine.model_executor.driver_worker.model_runner
    for seed in (1, 0):
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        params = {path: jnp.asarray(value) for path, value in flat(model_of(seed)).items()}
        for i, (name, array) in enumerate(hf_tensors(CONFIG, params, dtype=jnp.float32).items()):
            match i % 3:
                case 0:
                    worker.model.load_weights([(name, array)])
                case 1:
                    assert llm.collective_rpc("load_weights", args=([(name, array)],)) == [None]
                case _:
                    assert llm.collective_rpc(extension_method, kwargs={"name": name, "array": array}) == [name]
        llm.reset_prefix_cache()
        with pytest.raises(NotImplementedError, match=r"reload_weights.*update_weights\(arrays\)"):
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        asked = {"n": 1, "repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        params = SamplingParams(
            **asked, max_tokens=6, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[a-z]{6}")
        )
        (found,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling_params=params, use_tqdm=False)
        assert len(found.outputs[0].text) == 6
        found, again = llm.generate([PROMPT] * 2, replace(params, structured_outputs=None, seed=3, top_k=-1))
        for output in (found.outputs[0], again.outputs[0]):
            exact = scores(seed, PROMPT + output.token_ids, 0.7)[len(PROMPT) - 1 : -1]
            for row, token, place in zip(exact, output.token_ids, output.logprobs, strict=True):
                ranked = sorted(place.items(), key=lambda item: item[1].rank)
                order = [*np.argsort(-row)[:2].tolist()]
                assert [id for id, _ in ranked] == (order if token in order else [*order, token])
                assert [own.rank for _, own in ranked] == [1 + int((row > row[id]).sum()) for id, _ in ranked]
                np.testing.assert_allclose([own.logprob for _, own in ranked], row[[id for id, _ in ranked]], atol=1e-4)


def test_some_of_the_weights_are_refused_by_name(llm):
    llm.load_weights([("model.norm.weight", np.ones(64, np.float32))])
    with pytest.raises(ValueError, match="missing"):
        llm.generate([PROMPT], GREEDY)
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


def test_openrlhf_rolls_out(engine):
    params = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9, min_tokens=1, skip_special_tokens=False, logprobs=1
    )

    async def rollout():
        assert not await engine.is_sleeping()
        await engine.reset_prefix_cache()
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        await engine.sleep(level=1)
        for tag in ("weights", "kv_cache"):
            await engine.wake_up(tags=[tag])
        prompt, final = TokensPrompt(prompt_token_ids=PROMPT), None
        async for output in engine.generate(prompt, deepcopy(params), request_id=vllm.random_uuid()):
            final = output
        return final

    final = asyncio.run(rollout())
    assert version.parse(vllm.__version__) > version.parse("0.10.0")
    assert engine.output_processor.get_num_unfinished_requests() == 0
    (output,) = final.outputs
    exact = scores(0, PROMPT + output.token_ids)[len(PROMPT) - 1 :]
    exact[0, list(engine.llm.engine.config.eos_token_ids)] = -np.inf  # by min_tokens
    exact[0] -= np.logaddexp.reduce(exact[0])
    told = [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)]
    np.testing.assert_allclose(told, exact[np.arange(len(told)), output.token_ids], atol=1e-4)


def test_openrlhf_syncs_weights_by_the_methods_of_its_own_worker(engine):
    with Listener(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as trainer:
        trained = trainer.submit(listener.accept)
        asked = ("init_process_group", None, (*listener.address, 1, 2, "openrlhf", "nccl", False))
        assert asyncio.run(engine.collective_rpc(*asked)) == [1]
        with trained.result() as group:
            for seed in (1, 0):
                params = {path: jnp.asarray(value) for path, value in flat(model_of(seed)).items()}
                for i, (name, array) in enumerate(hf_tensors(CONFIG, params, dtype=jnp.float32).items()):
                    told = (name, np.float32, array.shape)
                    if i % 2:
                        update = ("update_weight_cuda_ipc", (*told, {"here": (np.array, (array,))}, False))
                    else:
                        group.send_bytes(np.asarray(array).tobytes())
                        update = ("update_weight", (*told, False))
                    assert engine.llm.collective_rpc(update[0], args=update[1]) == [None]
                engine.llm.llm_engine.reset_prefix_cache()
                (output,) = engine.llm.generate([PROMPT], GREEDY)[0].outputs
                assert output.token_ids == [*scores(seed, PROMPT + output.token_ids)[len(PROMPT) - 1 : -1].argmax(-1)]
    assert engine.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("extension", "words"),
    [
        ("no_such_package.Worker", "'no_such_package.Worker' cannot be imported: No module named"),
        ("tests.scripts.Worker", "'tests.scripts.Worker' cannot be imported: module 'tests.scripts' has no attribute"),
        ("Worker", "'Worker' cannot be imported"),
        (print, "a class or its name, not <built-in function print>"),
        (
            type("Theirs", (), {"load_weights": print}),
            "the worker has a load_weights of its own: rename that of Theirs",
        ),
    ],
)
def test_an_extension_that_cannot_be_used_is_refused_at_once(folder, extension, words):  # noqa: F811
    with pytest.raises(ValueError, match=f"worker_extension_cls: .*{words}"):
        vllm.LLM(str(folder), worker_extension_cls=extension)


def test_an_extension_that_would_wait_for_a_process_of_each_chip_is_refused():
    with pytest.raises(ValueError, match=r"one process drives all 2: give tensor_parallel_size=1.*update_weights"):
        check_alone(worker_class(Extension), 2)
    check_alone(worker_class(None), 2)


def test_an_extension_finds_torch_as_in_vllm(llm):
    torch = pytest.importorskip("torch", reason="torch is a trainer's, and not installed here")
    worker = llm.llm_engine.model_executor.driver_worker
    assert (worker.device, worker.model_config.dtype) == (torch.device("cpu"), torch.float32)
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    llm.load_weights([("model.norm.weight", parameter)])
    assert llm._loaded.pop("model.norm.weight").tolist() == [1.0] * 64


def test_a_stream_is_the_result_in_parts_and_can_be_aborted(engine):
    (whole,) = engine.llm.generate([PROMPT], replace(GREEDY, n=2))

    async def heard(kind: RequestOutputKind, id: str) -> list[vllm.RequestOutput]:
        params = replace(GREEDY, n=2, output_kind=kind)
        return [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params, id)]

    async def aborted() -> vllm.RequestOutput:
        async for output in engine.generate(PROMPT, replace(GREEDY, max_tokens=40, detokenize=False), "gone"):
            await engine.abort("gone")
            last = output
        return last

    for kind in RequestOutputKind:
        outputs = asyncio.run(heard(kind, f"as-{kind.name}"))
        assert {output.request_id for output in outputs} == {f"as-{kind.name}"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for i, expected in enumerate(whole.outputs):
            parts = outputs if kind is RequestOutputKind.DELTA else outputs[-1:]
            assert "".join(part.outputs[i].text for part in parts) == expected.text
            assert [id for part in parts for id in part.outputs[i].token_ids] == expected.token_ids
            assert [place for part in parts for place in part.outputs[i].logprobs] == expected.logprobs
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
    (output,) = asyncio.run(aborted()).outputs
    assert (output.finish_reason, len(output.token_ids) < 40) == ("abort", True)


def searched(width: int, num_tokens: int, penalty: float, ends: tuple[int, ...]) -> list[tuple[float, list[int]]]:
    """(score, tokens) of the best answers, by a search over the exact log-probabilities. As in vLLM, the length in a
    score is that of prompt and answer without the end token."""

    def score(total: float, tokens: list[int]) -> float:
        return total / (len(PROMPT) + len(tokens) - (tokens[-1] in ends)) ** penalty

    beams, over = [(0.0, [])], []
    for _ in range(num_tokens):
        longer = []
        for total, tokens in beams:
            row = scores(0, PROMPT + tokens)[-1]
            longer += [(total + row[id], [*tokens, int(id)]) for id in np.argsort(-row)[: 2 * width]]
        over += [beam for beam in longer if beam[1][-1] in ends]
        beams = sorted((beam for beam in longer if beam[1][-1] not in ends), reverse=True)[:width]
    return sorted(((score(*beam), beam[1]) for beam in over + beams), reverse=True)[:width]


@pytest.fixture
def ends(llm, monkeypatch):
    """End tokens that are likely, so that some beams end early."""
    ends = tuple(np.argsort(-scores(0, PROMPT)[-1])[1:3].tolist())
    monkeypatch.setattr(llm._client, "info", msgspec.structs.replace(llm._client.info, eos_token_ids=ends))
    return ends


@pytest.mark.parametrize(("width", "penalty"), [(1, 1.0), (3, 1.0), (3, 0.0), (4, 10.0)])
def test_beam_search_finds_the_best_answers(llm, ends, width, penalty):
    params = BeamSearchParams(beam_width=width, max_tokens=4, length_penalty=penalty)
    prompts = [TokensPrompt(prompt_token_ids=PROMPT), "abc"]
    found, other = llm.beam_search(prompts, params)
    expected = searched(width, 4, penalty, ends)
    assert [beam.tokens[len(PROMPT) :] for beam in found.sequences] == [tokens for _, tokens in expected]
    for beam, (score, tokens) in zip(found.sequences, expected, strict=True):
        length = len(PROMPT) + len(tokens) - (tokens[-1] in ends)
        assert beam.cum_logprob / length**penalty == pytest.approx(score, abs=1e-4)
        assert beam.finish_reason == ("stop" if tokens[-1] in ends else "length")
        assert beam.text == llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=True)
    assert len(other.sequences) == width
    with pytest.raises(ValueError, match="beam_width: 1 to 10, not 11"):
        llm.beam_search(prompts, replace(params, beam_width=11))


@pytest.mark.slow
def test_the_beams_of_the_demo_are_the_best(monkeypatch):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    with vllm.LLM(model="demo", device="cpu", compile_cache=str(COMPILED), **limits) as llm:
        model, prompt = llm.model(), llm.get_tokenizer().encode("What is 47 + 35?")
        monkeypatch.setitem(globals(), "model_of", lambda seed: model)
        monkeypatch.setitem(globals(), "PROMPT", prompt)
        params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=2.0)
        (found,) = llm.beam_search([TokensPrompt(prompt_token_ids=prompt)], params)
        expected = searched(4, 8, 2.0, llm.engine.config.eos_token_ids)
        assert [beam.tokens[len(prompt) :] for beam in found.sequences] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("shows_end", [False, True])
def test_beams_over_http_are_the_choices(llm, ends, shows_end):
    """Two completions at once, of which the first has the answers that the search over exact numbers finds."""
    asked = {"prompt": [PROMPT, PROMPT[:3]], "use_beam_search": True, "n": 3, "max_tokens": 4, "logprobs": 2}
    asked |= {"return_token_ids": True, "include_stop_str_in_output": shows_end, "temperature": 0.5}
    answers: dict[int, tuple[int, dict]] = {}
    chat = {"messages": [{"role": "user", "content": "abc"}], "use_beam_search": True, "n": 2, "max_tokens": 3}
    bodies = [("/v1/completions", asked), ("/v1/chat/completions", chat)]
    bodies = [(path, {"model": llm.model_name} | body) for path, body in bodies]
    llm.post_all(bodies, lambda index, status, answer: answers.__setitem__(index, (status, answer)))
    (status, answer), (of_chat, chats) = answers[0], answers[1]
    assert (status, of_chat) == (200, 200), answers
    assert len(answer["choices"]) == 6 and [choice["index"] for choice in chats["choices"]] == [0, 1]
    num_tokens = 0
    for choice, (_, tokens) in zip(answer["choices"], searched(3, 4, 1.0, ends), strict=False):
        has_ended = tokens[-1] in ends
        shown = tokens if shows_end or not has_ended else tokens[:-1]
        assert (choice["token_ids"], choice["finish_reason"]) == (shown, "stop" if has_ended else "length")
        told = tokens[:-1] if has_ended else tokens
        assert choice["text"] == llm.get_tokenizer().decode(told, skip_special_tokens=True)
        exact = [scores(0, PROMPT + tokens[:i])[-1][id] for i, id in enumerate(shown)]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], exact, atol=1e-4)
        num_tokens += len(shown)
    rest = sum(len(choice["token_ids"]) for choice in answer["choices"][3:])
    assert answer["usage"]["completion_tokens"] == num_tokens + rest
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 3


def test_labels_have_the_log_probabilities_of_the_model(llm):
    labels = [5, 500, 77, 5]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprob_token_ids=labels)
    (output,) = llm.generate([PROMPT], params)[0].outputs
    exact = scores(0, PROMPT + output.token_ids)[len(PROMPT) - 1 : -1]
    for row, token, place in zip(exact, output.token_ids, output.logprobs, strict=True):
        assert [*place] == [token, *(id for id in (5, 500, 77) if id != token)] and place[token].rank == 1
        np.testing.assert_allclose([own.logprob for own in place.values()], row[[*place]], atol=1e-4)
    assert (
        len(llm.generate([PROMPT], replace(params, logprob_token_ids=list(range(128))))[0].outputs[0].logprobs[0])
        >= 128
    )


def test_an_llm_takes_the_servers_flags(folder, tmp_path, monkeypatch, caplog):  # noqa: F811
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 5}')
    (tmp_path / "shout.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    monkeypatch.setenv("VLLM_API_KEY", "of a server")
    flags = {
        "generation_config": str(tmp_path), "override_generation_config": {"top_p": 0.5}, "max_output_tokens": 7,
        "chat_template": tmp_path / "shout.jinja", "reasoning_parser": "none", "tool_call_parser": "hermes",
        "served_model_name": ["first", "second"], "host": "0.0.0.0", "api_key": "secret", "disable_log_requests": True,
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "page_size": 16, "num_pages": 24,
    }  # fmt: skip
    with vllm.LLM(str(folder), device="cpu", compile_cache=str(COMPILED), **flags) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_p=0.5)
        chat = [{"role": "user", "content": "abc"}]
        (shouted,) = llm.chat(chat, {"max_tokens": 9})
        assert llm.get_tokenizer().decode(shouted.prompt_token_ids).endswith("ABC")
        assert len(shouted.outputs[0].token_ids) == 5
        given = {"chat_template": "x{{ messages[0].content }}", "chat_template_content_format": "auto"}
        (own,) = llm.chat(chat, {"max_tokens": 1}, **given, mm_processor_kwargs=None, tools=None)
        assert llm.get_tokenizer().decode(own.prompt_token_ids).endswith("xabc")
        with pytest.raises(ValueError, match="chat_template_content_format='openai': templates get"):
            llm.chat(chat, chat_template_content_format="openai")
        answers = []
        for name in ("first", "second", "third"):
            llm.post_all([(vllm.CHAT, {"model": name, "messages": chat})], lambda *told: answers.append(told[1]))
        assert answers == [200, 200, 404]
    told = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert [line.split()[0] for line in told] == ["--disable-log-requests", "host", "api_key"]
    for wrong, words in (
        ({"data_parallel_size": 2}, "data_parallel_size: an LLM has one engine on this host"),
        ({"generation_config": "/no/folder"}, "--generation-config /no/folder: there is no generation_config.json"),
        ({"reasoning_parser": "loud"}, "--reasoning-parser: invalid choice: 'loud'"),
        ({"tool_parser": "hermes"}, "there is no --tool-parser; the nearest is --tool-call-parser"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm.LLM(str(folder), device="cpu", **wrong)


def test_what_else_is_called(llm, make_llm):
    params = SamplingParams(2, 0.5, 0.25, 1.5, 0.7, None, 0.9, 7, 0.1, 3)
    assert (params.n, params.temperature, params.top_p, params.top_k, params.seed) == (2, 0.7, 0.9, 7, 3)
    assert params.clone() == params and params.clone() is not params
    assert SamplingParams.from_optional(n=2, seed=None, top_k=None) == SamplingParams(n=2)
    assert llm.get_default_sampling_params() == SamplingParams()
    (metric,) = [one for one in llm.get_metrics() if one.name == "pallas_serve:generation_tokens_total"]
    assert metric.value > 0 and metric.labels["model_name"] == llm.model_name
    with pytest.raises(TypeError, match="'use_tdqm': did you mean 'use_tqdm'"):
        llm.generate([PROMPT], GREEDY, use_tdqm=True)
    (cut,) = llm.generate("abcdef", GREEDY, priority=1, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert len(cut.prompt_token_ids) == 2
    assert len(llm.generate(["a", "b"], GREEDY, priority=[2, 1])) == 2
    with pytest.raises(ValueError, match="one priority for all prompts, or one for each: 1 prompts, 2 of them"):
        llm.generate("a", GREEDY, priority=[2, 1])
    with make_llm(pooling=Pooling.LAST) as other:
        (one, two, same) = other.encode(["a", "b", "a"], vllm.PoolingParams(use_activation=True), pooling_task="embed")
        scored = other.score("a", ["b", "a"])
        assert [found.outputs.score for found in scored] == pytest.approx(
            [one.outputs.data @ two.outputs.data, 1], abs=1e-6
        )
        assert one.outputs.data.tolist() == same.outputs.embedding
        assert scored[0].prompt_token_ids == one.prompt_token_ids + two.prompt_token_ids
        with pytest.raises(ValueError, match="data_1: one prompt, or as many as data_2, 1, not 2"):
            other.score(["a", "b"], "a")
        with pytest.raises(vllm.RefusedError, match=r"task: .*logprob_token_ids"):
            other.encode("a", pooling_task="classify")
    with pytest.raises(ValueError, match=r"classify: the model has no classes.*logprob_token_ids"):
        llm.classify(["a"], use_tqdm=False)
