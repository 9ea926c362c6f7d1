"""Requests of hostile or broken clients, one attack per function. Each is bounded: most take seconds.

An attack raises AssertionError for an answer that is not allowed. For most attacks the server may also close the
connection, and it may answer 503 to a long body while other attacks fill its memory for bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
from collections.abc import Awaitable, Callable
from random import Random

import psutil

from tests.server.support import zmtp
from tests.soak.questions import ADD_TOOL, CHAT
from tests.soak.victim import PATIENCE_S, Victim, answer, answered, asked, chat, completion, connected, ends

Attack = Callable[[Victim, Random], Awaitable[None]]
A_MILLION = 1_000_000


async def hostile_stop_strings(victim: Victim, random: Random) -> None:
    """Stop strings that almost match at every character."""
    stops = ["a" * random.randint(400, 600) + "b" * random.randint(300, 423) + "X" for _ in range(31)]
    await ends(victim, stop=stops, max_tokens=200, ignore_eos=True, prompt="a" * 50)


async def endless_trailers(victim: Victim, random: Random) -> None:
    """Trailers after the last chunk, megabytes of them."""
    head = victim.head("POST", "/v1/completions", "Transfer-Encoding: chunked")
    status = await answer(victim, head + b"0\r\n" + b"a: b\r\n" * 640_000)
    assert status in (0, 400, 503), status


async def large_answer(victim: Victim, random: Random) -> None:
    """Asks for many choices with the most log-probabilities."""
    await ends(victim, n=16, logprobs=20, max_tokens=100, ignore_eos=True)


async def scored_prompts(victim: Victim, random: Random) -> None:
    """Asks for the log-probabilities of a prompt in eight choices."""
    prompt = [random.randint(5, 200) for _ in range(200)]
    await ends(victim, n=8, prompt=prompt, prompt_logprobs=20, max_tokens=1)


async def many_long_prompts(victim: Victim, random: Random) -> None:
    """Sends 64 prompts of 4,000 words in one request."""
    status = await completion(victim, prompt=["word " * 4000] * 64, max_tokens=1)
    assert status in (400, 429, 503), status


async def echoed_ids(victim: Victim, random: Random) -> None:
    """Asks for the echo of 32 prompts of token ids."""
    await ends(victim, prompt=[[7] * 400] * 32, max_tokens=1, echo=True)


async def too_large_a_body(victim: Victim, random: Random) -> None:
    """Sends a body of 9 MiB."""
    status = await answer(victim, victim.post("/v1/completions", b'{"prompt": "' + b"a" * (9 << 20)))
    assert status in (0, 413, 503), status


async def not_json(victim: Victim, random: Random) -> None:
    """Sends random bytes as a body."""
    garbage = random.randbytes(random.randint(1, 2000))
    assert await answer(victim, victim.post("/v1/chat/completions", garbage)) == 400


async def deep_json(victim: Victim, random: Random) -> None:
    """Sends 100,000 opening brackets as a body."""
    assert await answer(victim, victim.post("/v1/chat/completions", b"[" * 100_000)) == 400


async def not_http(victim: Victim, random: Random) -> None:
    """Sends random bytes as a request."""
    assert await answer(victim, random.randbytes(500) + b"\r\n\r\n") in (0, 400)


async def silent_connections(victim: Victim, random: Random) -> None:
    """Connections that send nothing, or half a request, for a while."""
    async with contextlib.AsyncExitStack() as stack:
        for i in range(20):
            _, writer = await stack.enter_async_context(connected(victim))
            beginnings = (
                b"",
                b"GET /health HTTP/1.1\r\nHo",
                victim.head("POST", "/v1/completions", "Content-Length: 9") + b"{",
            )
            writer.write(beginnings[i % 3])
        await asyncio.sleep(random.uniform(0.5, 2))


async def leaving_mid_stream(victim: Victim, random: Random) -> None:
    """Closes the connection while its answer is streamed."""
    body = {"model": victim.model, "prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    async with connected(victim) as (reader, writer):
        writer.write(victim.post("/v1/completions", json.dumps(body).encode()))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            for _ in range(random.randint(0, 5)):
                await asyncio.wait_for(reader.read(1000), PATIENCE_S)


async def half_closing(victim: Victim, random: Random) -> None:
    """A client that closes its half of the connection after its request."""
    async with connected(victim) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)


async def strange_routes(victim: Victim, random: Random) -> None:
    """Asks for paths and methods that are not served."""
    for method, path in (("GET", "/metrics/"), ("DELETE", "/v1/models"), ("GET", "/%00%ff")):
        assert await answer(victim, victim.head(method, path)) in (400, 404, 405)


# route, the beginning of a body, the field, an entry
LONG_LISTS = (
    ("/v1/completions", b"{", b"prompt", b"5"),
    ("/v1/completions", b"{", b"prompt", b'"a"'),
    ("/v1/completions", b"{", b"prompt", b"[5]"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, ', b"allowed_token_ids", b"5"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, ', b"stop_token_ids", b"5"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, ', b"stop", b'"a"'),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, ', b"bad_words", b'"a"'),
    ("/v1/responses", b'{"input": "a", ', b"include", b'"a"'),
    ("/detokenize", b"{", b"tokens", b"5"),
)
SERVED_LISTS = (b"allowed_token_ids", b"tokens")  # one id, a million times, is one allowed id, and a long text


async def long_lists(victim: Victim, random: Random) -> None:
    """Sends lists of a million entries. A refusal names the field."""
    for path, start, field, entry in random.sample(LONG_LISTS, len(LONG_LISTS)):
        body = b'%s"%s": [%s%s]}' % (start, field, entry, (b"," + entry) * (A_MILLION - 1))
        status, said = await answered(victim, victim.post(path, body))
        served = (200,) if field in SERVED_LISTS else ()
        assert status in (*served, 400, 429, 503), (field, status)
        assert status != 400 or field in said or b"maximum context length" in said, (field, said[:200])


async def unfinished_bodies(victim: Victim, random: Random) -> None:
    """60 connections send a MiB of a body each, and not its end. A short request is answered among them."""
    head = victim.head("POST", "/v1/completions", "Content-Type: application/json", "Transfer-Encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(60):
            _, writer = await stack.enter_async_context(connected(victim))
            with contextlib.suppress(ConnectionError):
                writer.write(head + chunk * 16)
                await asyncio.wait_for(writer.drain(), PATIENCE_S)
        assert await completion(victim, max_tokens=1) in (200, 429)


async def burst_and_drops(victim: Victim, random: Random) -> None:
    """Sends much of a body at once, and then a byte now and then. The server ends the wait."""
    async with connected(victim) as (reader, writer):
        head = victim.head("POST", "/v1/completions", "Content-Type: application/json", "Content-Length: 1000000")
        writer.write(head + b" " * 100_000)
        reading = asyncio.ensure_future(reader.read(1))
        async with asyncio.timeout(PATIENCE_S):
            while not reading.done():
                writer.write(b" ")
                await asyncio.wait({reading}, timeout=0.5)
        with contextlib.suppress(ConnectionError):
            await reading


COSTLY_TEMPLATES = (
    "{{ 'a' | center(300000000) }}",
    "{{ 'a' * 300000000 }}",
    "{{ '%300000000d' % 1 }}",
    "{{ [1] | tojson(indent=300000000) }}",
    "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = i %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
)


async def costly_templates(victim: Victim, random: Random) -> None:
    """Sends a chat template that would take gigabytes or hours."""
    path, template = random.choice((CHAT, "/tokenize")), random.choice(COSTLY_TEMPLATES)
    status = await asked(victim, path, messages=[{"role": "user", "content": "a"}], chat_template=template)
    assert status in (400, 429), (template, status)


async def killed_template_process(victim: Victim, random: Random) -> None:
    """Kills a process that runs a request's template. The next conversations are rendered."""
    found = []
    for child in psutil.Process(victim.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "server.text.template_process" in child.cmdline():
                found.append(child)
    if found:
        with contextlib.suppress(psutil.NoSuchProcess):
            random.choice(found).kill()
    status = await chat(victim)
    assert status in (200, 429), status


async def crowd(victim: Victim, random: Random) -> None:
    """Asks for 64 long choices. A single token is answered before their end."""
    body = {"model": victim.model, "prompt": "Once", "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with connected(victim) as (reader, writer):
        writer.write(victim.post("/v1/completions", json.dumps(body).encode(), "Connection: close"))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        if b" 429 " in head:
            return
        assert b" 200 " in head, head
        reading = asyncio.ensure_future(reader.read())
        try:
            assert await completion(victim, max_tokens=1) in (200, 429)
            assert not reading.done(), "64 choices were answered before a single token"
        finally:
            reading.cancel()


async def cut_tool_calls(victim: Victim, random: Random) -> None:
    """Calls that max_tokens or a stop string cuts, or whose client leaves. A whole answer has objects as arguments."""
    choices = ("auto", "required", {"type": "function", "function": {"name": "add"}})
    cut = random.choice(({"max_tokens": random.randint(1, 30)}, {"stop": [random.choice(("second", '"', ":", "}"))]}))
    stream = random.random() < 0.5
    body = {
        "model": victim.model,
        "messages": [{"role": "user", "content": "What is 12 + 9?"}],
        "tools": [ADD_TOOL],
        "tool_choice": random.choice(choices),
        "stream": stream,
        "max_tokens": 48,
        **cut,
    }
    request = victim.post(CHAT, json.dumps(body).encode())
    if stream:
        async with connected(victim) as (reader, writer):
            writer.write(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(random.randint(1, 12)):
                    await asyncio.wait_for(reader.read(500), PATIENCE_S)
        return
    status, said = await answered(victim, request)
    assert status in (200, 429), (status, said)
    if status == 200:
        (choice,) = json.loads(said)["choices"]
        message = choice["message"]
        assert "{" not in (message["content"] or ""), (body, message)
        *calls, last = message.get("tool_calls") or (None,)
        if body["tool_choice"] == "auto" or choice["finish_reason"] != "length":  # else the last may be cut
            calls.append(last)
        for call in filter(None, calls):
            assert isinstance(json.loads(call["function"]["arguments"]), dict), (body, message)


COSTLY_GRAMMARS = (
    {"regex": "(a{0,900}b){0,900}"},
    {"regex": "(((a?b?){99}){99}){99}"},
    {"regex": "(" * 500 + "a" + ")" * 500},
    {"grammar": "start: " + "a? " * 1000 + '\na: "x" | "xy"\n'},
    {"grammar": "start: " + "a? " * 9000 + '\na: "x" | "xy"\n'},
    {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}},
)


async def costly_grammars(victim: Victim, random: Random) -> None:
    """Asks for outputs by grammars that take long to compile or to follow."""
    for grammar in random.sample(COSTLY_GRAMMARS, len(COSTLY_GRAMMARS)):
        await ends(victim, structured_outputs=grammar)


async def anothers_response(victim: Victim, random: Random) -> None:
    """Reads, continues and deletes a response with another API key than the one that made it."""
    body = {"model": victim.model, "input": "What is 12 + 9?", "max_output_tokens": 16}
    status, said = await answered(victim, victim.post("/v1/responses", json.dumps(body).encode()))
    if status == 429:
        return
    assert status == 200, (status, said)
    id = json.loads(said)["id"]
    path, thief = f"/v1/responses/{id}", victim.other_key
    for method, of in (("GET", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel"), ("DELETE", path)):
        status = await answer(victim, victim.head(method, of, "Content-Length: 0", key=thief))
        assert status == 404, (method, of, status)
    continued = json.dumps(body | {"previous_response_id": id}).encode()
    assert await answer(victim, victim.post("/v1/responses", continued, key=thief)) in (400, 429)
    for method in ("GET", "DELETE"):
        assert await answer(victim, victim.head(method, path)) == 200, method


async def wrong_names(victim: Victim, random: Random) -> None:
    """Asks for a model or an adapter that is not served."""
    assert await completion(victim, model=f"adapter-{random.randint(0, 999)}") == 404
    assert await chat(victim, model="../" * random.randint(1, 99)) == 404
    assert await asked(victim, "/v1/load_lora_adapter", lora_name="a", lora_path="/etc") in (401, 403)


async def spaces_before_the_answer(victim: Victim, random: Random) -> None:
    """A beginning of the answer that ends with white space, which Anthropic's API refuses."""
    messages = [
        {"role": "user", "content": "What is 47 + 35?"},
        {"role": "assistant", "content": "47 + 35 =" + random.choice((" ", "\n", "\t \n", " " * 9999))},
    ]
    assert await asked(victim, "/v1/messages", messages=messages, max_tokens=4) == 400


async def special_tokens_as_text(victim: Victim, random: Random) -> None:
    """Writes the texts of special tokens into prompts."""
    texts = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>system<|end_header_id|>", "<tool_call>", "<|x|>")
    text = "".join(random.choices(texts, k=random.randint(1, 9)))
    status = await completion(victim, prompt=text, echo=True)
    assert status in (200, 429), status
    status = await chat(victim, messages=[{"role": "user", "content": text}, {"role": "assistant", "content": text}])
    assert status in (200, 429), status


async def many_parts(victim: Victim, random: Random) -> None:
    """Uploads a form of very many tiny parts, or fields."""
    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n1\r\n'
    name = random.choice((b"a", b'file"; filename="a'))
    body = part % name * random.choice((5, 100_000)) + b"--x--\r\n"
    kind = ("Content-Type: multipart/form-data; boundary=x", f"Content-Length: {len(body)}")
    status = await answer(victim, victim.head("POST", "/v1/files", *kind) + body)
    assert status in (0, 400, 503), status


async def requests_ahead(victim: Victim, random: Random) -> None:
    """Sends requests without waiting for the answer to the first, which alone is answered."""
    ahead = victim.head("GET", "/version") * random.randint(2, 20_000)
    assert await answer(victim, ahead) in (0, 200)
    body = json.dumps({"model": victim.model, "prompt": "Once", "max_tokens": 2}).encode()
    status = await answer(victim, victim.post("/v1/completions", body) + ahead)
    assert status in (0, 200, 429), status


async def numbers_beyond_doubles(victim: Victim, random: Random) -> None:
    """Schemas with numbers that no double holds, and fields with numbers that no machine word holds."""
    value = random.choice((-(2**63), 2**63 + 1, 10**30 + 7, -1.1892378059464719))
    keyword = random.choice(("const", "minimum", "exclusiveMaximum", "multipleOf"))
    schema = {"type": "object", "properties": {"n": {"type": "number", keyword: value}}, "required": ["n"]}
    await ends(victim, structured_outputs={"json": schema})
    for field in ("seed", "top_k", "max_tokens", "priority", "min_tokens", "logprobs"):
        await ends(victim, **{field: random.choice((2**63, -(2**64), 10**40))})


async def fields_of_other_servers(victim: Victim, random: Random) -> None:
    """Asks for what other servers would answer otherwise."""
    fields = {"lora_path": "/a", "num_beams": 4, "stop_regex": "a+", "no_repeat_ngram_size": 2, "adapter_id": "a"}
    field = random.choice(sorted(fields))
    assert await completion(victim, **{field: fields[field]}) == 400, field


async def readers_of_events(victim: Victim, random: Random) -> None:
    """A message without an end, a frame of four gigabytes, and silent connections at the port of the events."""
    flooded = await asyncio.to_thread(zmtp.flood, victim.events_port, b"SUB")
    assert flooded <= zmtp.MOST_FLOODED, flooded
    assert await asyncio.to_thread(zmtp.is_refused, victim.events_port, b"SUB", 2**32)
    await asyncio.to_thread(_connect_often, victim.host, victim.events_port)


def _connect_often(host: str, port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, port)))


ATTACKS: tuple[Attack, ...] = tuple(
    one for one in globals().values() if inspect.iscoroutinefunction(one) and one.__module__ == __name__
)
