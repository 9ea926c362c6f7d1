"""The bench "peers" from end to end, with two small servers in processes of their own as the peers."""

import json
import sys

from scripts.lab import peers

# Answers every request with as many chunks as it asks for; the second argument is a field that it refuses.
SERVER = """
import sys
from aiohttp import web

async def health(request):
    return web.Response()

async def complete(request):
    body = await request.json()
    if sys.argv[2] in body:
        return web.json_response({"error": "unexpected field"}, status=422)
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    await response.write(b"data: [DONE]\\n\\n")
    return response

app = web.Application()
app.router.add_get("/health", health)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


def test_the_same_load_on_each_and_one_table(tmp_path, monkeypatch, capsys, free_port):
    (tmp_path / "server.py").write_text(SERVER)
    rows = [{"prompt": f"p{i}", "max_tokens": 3 + i % 4} for i in range(14)]
    (tmp_path / "work.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = f"{sys.executable} {tmp_path}/server.py {{port}}"
    arguments = ["--server", f"ours={command} nothing", "--server", f"theirs,plain={command} ignore_eos"]
    arguments += ["--model", "m", "--dataset-path", str(tmp_path / "work.jsonl"), "--concurrency", "2:6", "4:10"]
    arguments += ["--port", str(free_port), "--output-json", str(tmp_path / "out.json")]
    assert peers.main(arguments) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert [(r["server"], r["concurrency"], r["completed"]) for r in results] == [
        ("ours", 2, 6),
        ("ours", 4, 10),
        ("theirs", 2, 6),
        ("theirs", 4, 10),
    ]
    assert all(r["output_tokens"] == r["output_tokens_wanted"] for r in results)
    printed = capsys.readouterr().out
    assert "ours / theirs at 2: " in printed
    assert "other lengths" not in printed


def test_a_server_that_does_not_come_up_is_said(tmp_path, free_port, capsys):
    (tmp_path / "work.jsonl").write_text("\n".join(json.dumps({"prompt": "p", "max_tokens": 1}) for _ in range(9)))
    flags = ["--server", "broken=false {port}", "--model", "m", "--dataset-path", str(tmp_path / "work.jsonl")]
    assert peers.main([*flags, "--concurrency", "1:2", "--port", str(free_port)]) == 1
    assert capsys.readouterr().err.startswith("peers: broken did not come up")
