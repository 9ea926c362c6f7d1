"""The page at `/` and the numbers it draws, over real sockets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.api.routes.ui import FOLDER
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import ECHO, RunningServer, running_server


def test_the_page_and_every_file_that_it_names_are_served(echo: RunningServer) -> None:
    with echo.http() as http:
        page = http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        names = set(re.findall(r'"(/ui/[^"?]+)"', page.text))
        for path in FOLDER.glob("*.js"):
            names |= set(re.findall(r'from "(/ui/[^"]+)"', path.read_text()))
        assert {f"/ui/{path.name}" for path in FOLDER.iterdir() if path.suffix != ".html"} == names
        for name in names:
            assert http.get(name).status_code == 200, name


def test_the_page_names_no_other_host(echo: RunningServer) -> None:
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
    with echo.http() as http:
        assert "default-src 'none'" in http.get("/").headers["content-security-policy"]


def test_a_file_that_the_browser_has_is_not_sent_again(echo: RunningServer) -> None:
    with echo.http() as http:
        first = http.get("/ui/style.css")
        again = http.get("/ui/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_numbers_are_those_of_the_engine(echo: RunningServer) -> None:
    with echo.http() as http:
        state = http.get("/ui/state").json()
    assert state["model"] == "test-model"
    assert state["alive"]
    assert state["pages"] == 100
    assert (state["draft_tokens"], state["draft_tokens_accepted"]) == (0, 0)
    histogram = state["inter_token_latency"]
    assert len(histogram["counts"]) == len(histogram["bounds"]) + 1


@pytest.mark.parametrize("after", ["", "x", "1.5"])
def test_a_step_that_is_no_number_is_refused(echo: RunningServer, after: str) -> None:
    with echo.http() as http:
        answer = http.get("/ui/state", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


def test_the_page_is_open_and_its_numbers_need_the_key(tmp_path: Path) -> None:
    with running_server(tmp_path, ECHO, EchoConfig(), api_keys=("secret",)) as server, server.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/ui/state").status_code == 401
        assert http.get("/ui/state", headers={"authorization": "Bearer secret"}).status_code == 200


def test_without_the_page_its_paths_are_not_there(tmp_path: Path) -> None:
    with running_server(tmp_path, ECHO, EchoConfig(), ui=False) as server, server.http() as http:
        assert {http.get(path).status_code for path in ("/", "/ui/state", "/ui/main.js")} == {404}
