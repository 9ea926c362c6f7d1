"""The page at `/` in a real browser: a message is sent and its answer seen, the charts move, the console is silent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.support.adapters import FakeStore, write_adapter
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CALCULATOR
from tests.server.support.running import ECHO, RunningServer, running_server, server_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: scripts/test --all does it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: `apt-get install chromium` gives one"),
]
DONE = ".message.assistant[aria-busy=false]"
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
# Controls with neither a label, nor a text, nor an `aria-label`.
WITHOUT_A_NAME = """all => all.filter(one =>
    !(one.ariaLabel ?? "").trim() && !one.labels?.length && !one.textContent.trim()).map(one => one.outerHTML)"""
CANVAS = "document.querySelector('#{}').toDataURL()"
# In the page itself: on a busy machine the answer may end before a click from outside arrives.
STOP_AT_FIRST_TEXT = """() => new MutationObserver((_, observer) => {
    if (!document.querySelector(".message.assistant[aria-busy=true] .text:not(:empty)")) return;
    observer.disconnect();
    document.querySelector("#stop").click();
}).observe(document.body, {subtree: true, childList: true, characterData: true})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    """A page whose console must stay silent."""
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    page.close()
    assert said == []


def send(page: sync_api.Page, text: str) -> str:
    """The text of the answer to `text`, which is sent by keyboard."""
    answers = page.locator(".message.assistant").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(DONE).nth(answers)
    answer.wait_for()
    return answer.locator(".text").inner_text()


def test_a_message_is_answered_and_a_second_turn_follows(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    assert "82" in send(page, "What is 47 + 35?")
    assert "57" in send(page, "Which is larger, 31 or 57?")
    assert page.get_by_text("tokens,").count() == 2
    page.get_by_role("button", name="Try again").click()
    page.locator(DONE).nth(1).wait_for()
    assert page.locator(".message.user").count() == 2


def answers_without_an_end(page: sync_api.Page) -> list[dict[str, object]]:
    """Lets answers be as long as the context; returns the requests to come."""
    requests: list[dict[str, object]] = []

    def without_an_end(route: sync_api.Route) -> None:
        body = json.loads(route.request.post_data) | {"ignore_eos": True}
        requests.append(body)
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", without_an_end)
    return requests


def test_an_answer_in_progress_stays_in_its_conversation(server: RunningServer, page: sync_api.Page) -> None:
    answers_without_an_end(page)
    page.goto(server.url)
    page.get_by_label("Message").fill("Count from 4 to 9.")
    page.keyboard.press("Enter")
    text = page.locator(".message.assistant .text:not(:empty)")
    text.wait_for()
    page.reload()
    assert text.count() == 1
    page.get_by_role("button", name="Try again").click()
    text.wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("button", name="Send").wait_for()
    send(page, "What is 47 + 35?")
    page.reload()
    assert page.locator(".message").count() == 2


def test_an_answer_is_stopped(server: RunningServer, page: sync_api.Page) -> None:
    """The answer is as long as the context unless it is stopped; what came until then stays."""
    requests = answers_without_an_end(page)
    page.goto(server.url)
    page.evaluate(STOP_AT_FIRST_TEXT)
    page.get_by_label("Message").fill("Count from 4 to 9.")
    page.get_by_role("button", name="Send").click()
    page.locator(DONE).wait_for()
    assert page.locator(".message.assistant .notes").inner_text().startswith("stopped")
    assert page.locator(".message.assistant .text:not(:empty)").count() == 1
    assert requests[0]["stream"] is True


def test_what_is_not_json_in_a_setting_is_said(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Functions").fill("[{")
    send(page, "What is 47 + 35?")
    assert page.locator(".error").inner_text().startswith("Tools: ")


def test_a_tool_call_is_shown_as_such_and_its_result_is_answered(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Functions").fill(json.dumps([CALCULATOR]))
    assert send(page, "What is 347 * 21?") == ""
    card = page.locator(".message.assistant .card")
    assert card.locator("b").inner_text() == "calculator"
    assert json.loads(card.locator("pre").inner_text()) == {"expression": "347 * 21"}
    field, composer = page.get_by_label("Result of calculator").bounding_box(), page.locator("#composer").bounding_box()
    assert field["y"] + field["height"] <= composer["y"]
    page.get_by_label("Result of calculator").fill("7287")
    page.keyboard.press("Enter")
    page.locator(DONE).nth(1).wait_for()
    assert page.locator(".message.tool .text").inner_text() == "7287"
    assert "7287" in page.locator(DONE).nth(1).locator(".text").inner_text()


def test_the_chat_offers_adapters_and_the_dashboard_counts_them(browser: sync_api.Browser, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "pirate", "Arrr")
    config = EchoConfig(reply=tuple(b"base"), adapters=FakeStore(), modules=(("pirate", str(folder)),))
    with running_server(tmp_path, ECHO, config, model_names=("m",)) as server:
        page = browser.new_page()
        page.goto(server.url)
        assert send(page, "hello") == "base"
        page.locator("#asked-model").select_option("pirate")
        assert send(page, "hello") == "Arrr"
        page.reload()
        sync_api.expect(page.locator("#asked-model option")).to_have_count(2)
        assert page.locator("#asked-model").input_value() == "pirate"
        page.get_by_role("link", name="Dashboard").click()
        tile = page.locator("#tiles div", has_text="Adapters")
        assert tile.locator("small").inner_text() == "running, 1 loaded, 0 swaps"
        page.close()


def test_reasoning_is_shown_folded(browser: sync_api.Browser, tmp_path: Path) -> None:
    config = EchoConfig(reply=tuple(b"<think>\nTwo and two.\n</think>\n\n4"))
    with running_server(tmp_path, ECHO, config, reasoning_parser="qwen3") as thinking:
        page = browser.new_page()
        page.goto(thinking.url)
        assert send(page, "2 + 2?") == "4"
        thought = page.locator(".message.assistant details.reasoning pre")
        assert not thought.is_visible()
        page.get_by_text("Thinking", exact=True).click()
        assert thought.inner_text() == "Two and two."
        page.reload()
        page.get_by_text("Thinking", exact=True).click()
        assert page.locator(".message.assistant .text").inner_text() == "4"
        page.close()


MARKDOWN, HOSTILE = ((Path(__file__).parent / "answers" / f"{name}.txt").read_text() for name in ("all", "hostile"))
HOSTILE += "\n\n".join([">" * 5000 + " deep", "\n".join(" " * 2 * i + "- n" for i in range(300)), "*a **b " * 3000])
HOSTILE += "\n\n" + "[" * 5000 + "x" * 30_000 + "\n\n```html\n<script>window.hacked = 1</script>\n" + "y" * 20_000
ELEMENTS = set("p a em strong ul li blockquote div table thead tbody tr th td figure figcaption pre code".split())
# A DOM as a text, without what differs by choice: levels of headings, paragraphs of items, frames of code and tables.
NORMAL = """function normal(node) {
    if (node.nodeType === 3) return node.data.trim() ? node.data : "";
    const tag = node.localName, inner = [...node.childNodes].map(normal).join("");
    if (tag === "figcaption") return "";
    if (["div", "figure", "body"].includes(tag) || (tag === "p" && node.parentNode.localName === "li")) return inner;
    const level = tag.match(/^h([1-6])$/) && (node.closest(".text") ? tag[1] - 3 : tag[1]);
    const marks = [node.getAttribute("href"), node.start > 1 && node.start].filter(Boolean);
    return `<${level || tag.replace(/^s$/, "del")} ${marks}>${tag === "code" ? inner.trimEnd() : inner}</>`;
}"""
SHOWN_IN_PIECES = """async text => {
    const { GrowingText } = await import("/ui/markdown.js"), root = document.createElement("div");
    const growing = new GrowingText(root), first = [];
    for (let i = 1; i <= text.length; i++) { growing.show(text.slice(0, i)); first.push(root.firstChild); }
    return [root.innerHTML, new Set(first.slice(text.indexOf("\\n") + 1)).size, text.length - growing.read];
}"""


# Its answer is the one of the seed.
REPLIES = tuple(tuple(text.encode()) for text in ("short", MARKDOWN, HOSTILE))
writer = server_of(EchoConfig(reply=tuple(b"an answer"), replies=REPLIES, max_model_len=200_000, tokens_per_step=100))


def test_markdown_is_shown_as_its_reference_renders_it(writer: RunningServer, page: sync_api.Page) -> None:
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py renders the reference")
    reference = markdown_it.MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    html = re.sub(r' style="[^"]*"|\n(?=<)', "", reference.render(MARKDOWN))
    page.goto(writer.url)
    page.get_by_label("Seed").fill("1")
    send(page, "Show all")
    text = page.locator(".message.assistant .text")
    parsed = f"html => ({NORMAL})(new DOMParser().parseFromString(html, 'text/html').body)"
    assert text.evaluate(NORMAL) == page.evaluate(parsed, html)
    pieces, num_first, _ = page.evaluate(SHOWN_IN_PIECES, MARKDOWN)
    assert pieces == text.evaluate("root => root.innerHTML")
    assert num_first == 1  # what was shown has stayed
    *_, rest = page.evaluate(SHOWN_IN_PIECES, "A line.\n\n- an item\n\n" * 100)
    assert rest < 40  # only so much is read again with the next piece


def test_a_hostile_answer_is_text(writer: RunningServer, browser: sync_api.Browser) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 740})
    page.goto(writer.url)
    page.locator("#seed").evaluate("field => field.value = 2")
    send(page, "Attack")
    parts = page.locator(".message.assistant .text *")
    assert set(parts.evaluate_all("all => all.map(one => one.localName)")) <= ELEMENTS | {"button", "span"}
    attributes = set(parts.evaluate_all("all => all.flatMap(one => one.getAttributeNames())"))
    assert attributes <= {"class", "href", "rel", "target", "type"}
    links = page.locator(".text a").evaluate_all("all => all.map(one => [one.protocol, one.rel, one.textContent])")
    assert links == [["https:", "noopener noreferrer", "d"], ["https:", "noopener noreferrer", "picture"]]
    assert page.evaluate("window.hacked === undefined && document.documentElement.scrollWidth <= innerWidth")
    again, notes = page.get_by_role("button", name="Try again"), page.locator(".message.assistant .notes")
    again, notes, composer = (part.bounding_box() for part in (again, notes, page.locator("#composer")))
    assert again["y"] + again["height"] <= notes["y"] or again["x"] + again["width"] <= notes["x"]
    assert notes["y"] + notes["height"] <= composer["y"]
    page.close()


@pytest.mark.parametrize("is_secure", [True, False], ids=["secure", "plain HTTP"])
def test_answers_and_code_are_copied(writer: RunningServer, page: sync_api.Page, is_secure: bool) -> None:
    if not is_secure:  # as from another host
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.goto(writer.url)
    page.get_by_label("Seed").fill("1")
    send(page, "Show all")
    for part, copied in (("foot", MARKDOWN), ("text figure", 'def f():\n\treturn "```"')):
        scope = page.locator(f".message.assistant .{part}").first
        scope.get_by_role("button", name="Copy").click()
        scope.get_by_role("button", name="Copied").wait_for()
        page.get_by_label("Message").fill("")
        page.get_by_label("Message").press("Control+V")
        assert page.get_by_label("Message").input_value() == copied


def test_questions_are_edited_and_messages_deleted(writer: RunningServer, page: sync_api.Page) -> None:
    page.goto(writer.url)
    field = page.get_by_label("Message")
    send(page, "first")
    send(page, "second")
    page.get_by_role("button", name="Edit").first.click()
    assert field.input_value() == "first"
    field.press("Escape")
    assert field.input_value() == ""
    page.get_by_role("button", name="Edit").nth(1).click()
    field.fill("changed")
    with page.expect_request("**/chat/completions") as changed:
        field.press("Enter")
    sync_api.expect(page.locator(DONE)).to_have_count(2)
    page.locator(".message.assistant").first.get_by_role("button", name="Delete").click()
    page.reload()
    with page.expect_request("**/chat/completions") as third:
        send(page, "third")
    asked = [[one["content"] for one in made.value.post_data_json["messages"]] for made in (changed, third)]
    assert asked == [["first", "an answer", "changed"], ["first", "changed", "an answer", "third"]]


def test_conversations_are_kept_in_the_browser(writer: RunningServer, browser: sync_api.Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(writer.url)
        send(page, "about cats")
        page.get_by_role("button", name="New conversation").click()
        send(page, "about dogs")
        page.close()
        page = context.new_page()
        page.goto(writer.url)
        assert page.locator(".message").count() == 0  # a new tab begins anew
        titles = page.locator("#conversations .title")
        assert titles.all_inner_texts() == ["about dogs", "about cats"]
        titles.nth(1).click()
        assert page.locator(".message.user .text").all_inner_texts() == ["about cats"]
        page.once("dialog", lambda dialog: dialog.accept("Pets"))
        page.get_by_role("button", name="Rename about cats").click()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete about dogs").click()
        assert titles.all_inner_texts() == ["Pets"]
        page.evaluate("""async () => {
            const { newConversation, save } = await import("/ui/conversations.js");
            const one = text => ({ ...newConversation(), messages: [{ role: "user", content: text }] });
            for (let i = 0; i < 60; i++) save(one("x".repeat(200_000) + i));  // more than fits
            window.kept = [save(one("the last")), save(one("x".repeat(2_000_000)))];
        }""")
        assert page.evaluate("window.kept") == [True, False]
        page.reload()
        assert titles.first.inner_text() == "the last"
        assert 10 < titles.count() < 50


def test_json_is_shown_as_such(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Answer", exact=True).select_option("JSON by a schema")
    shown = send(page, "What is 47 + 35? Answer in JSON.")
    assert isinstance(json.loads(shown)["answer"], int)
    assert page.locator(".message.assistant .card.json pre").inner_text() == shown
    assert "\n  " in shown


def shown(page: sync_api.Page, view: str) -> None:
    """Waits until the view has what it shows."""
    page.get_by_text("serving", exact=True).wait_for()
    if view == "plan":
        page.get_by_text("Estimated means").wait_for(timeout=60_000)  # the planner's process starts with the first one


GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("view", ["chat", "dashboard", "plan"])
def test_light_and_dark_on_a_phone(server: RunningServer, browser: sync_api.Browser, view: str) -> None:
    with browser.new_context(**PHONE, color_scheme="light") as context:
        page = context.new_page()
        page.goto(f"{server.url}/#{view}")
        shown(page, view)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        grounds = [page.evaluate(GROUND)]
        page.get_by_role("button", name="Switch between light and dark").click()
        grounds.append(page.evaluate(GROUND))
        page.emulate_media(color_scheme="dark")
        page.reload()
        grounds.append(page.evaluate(GROUND))
    light, chosen_dark, dark = grounds
    assert light != dark == chosen_dark


@pytest.mark.parametrize("view", ["chat", "dashboard", "plan"])
def test_every_control_has_a_name_and_is_reached_by_keyboard(
    server: RunningServer, page: sync_api.Page, view: str
) -> None:
    page.goto(f"{server.url}/#{view}")
    shown(page, view)
    controls = page.locator(", ".join(f"{tag}:visible" for tag in "a button input textarea select summary".split()))
    assert controls.evaluate_all(WITHOUT_A_NAME) == []
    for _ in range(controls.count() + 2):
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.isReached = true")
    assert controls.evaluate_all("all => all.filter(one => !one.isReached).map(one => one.outerHTML)") == []
    assert page.locator(f"main#{view} >> visible=true").count() == page.get_by_role("main").count() == 1
    assert page.locator("canvas:visible:not([role=img][aria-label])").count() == 0


def test_an_empty_chat_offers_what_the_demo_can_do(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    offers = page.locator("#suggestions button")
    offers.first.wait_for()
    for i in range(offers.count()):
        offers.nth(i).click()
        page.locator(DONE).wait_for()
        answer = page.locator(".message.assistant")
        assert answer.locator(".error").count() == 0
        assert answer.locator(".text").inner_text() or answer.locator(".card").count()
        page.get_by_role("button", name="New conversation").click()
    assert offers.first.is_visible()


def test_a_reload_keeps_the_conversation_and_the_settings(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    first = send(page, "What is 47 + 35?")
    page.reload()
    assert page.locator(".message.assistant .text").inner_text() == first
    assert page.get_by_label("Temperature").input_value() == "0"
    assert "57" in send(page, "Which is larger, 31 or 57?")
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    assert page.locator(".message").count() == 0


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_no_part_hides_another(server: RunningServer, browser: sync_api.Browser, width: int) -> None:
    """The header is one row, the composer is in sight, and the tiles are below the header in full rows."""
    with browser.new_context(viewport={"width": width, "height": 740}, has_touch=width < 500) as context:
        page = context.new_page()
        page.goto(server.url)
        page.get_by_text("serving", exact=True).wait_for()
        header = page.locator("header").bounding_box()
        assert header["height"] < 64
        send = page.get_by_role("button", name="Send").bounding_box()
        assert header["height"] < send["y"] < send["y"] + send["height"] <= 740
        assert page.get_by_label("Temperature").is_visible() == (width > 500)  # settings are folded on a phone
        if width < 500:
            targets = page.locator("a:visible:not(.skip), button:visible, summary:visible, textarea:visible")
            assert min(box["height"] for box in map(sync_api.Locator.bounding_box, targets.all())) >= 43.9
        page.goto(f"{server.url}/#dashboard")
        page.get_by_text("after warm-up").wait_for()
        tiles = "tiles => tiles.map(tile => Math.round(tile.getBoundingClientRect().top))"
        tops = page.locator("#tiles > div").evaluate_all(tiles)  # at once: each poll makes new tiles
        assert min(tops) >= header["height"]
        assert len({tops.count(top) for top in tops}) == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_charts_move(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(f"{server.url}/#dashboard")
    page.get_by_text("after warm-up").wait_for()
    before = {name: page.evaluate(CANVAS.format(name)) for name in ("occupancy", "throughput")}
    with server.client() as client:
        client.completions.create(model="demo", prompt="Once", max_tokens=200, extra_body={"ignore_eos": True})
    for name, picture in before.items():
        page.wait_for_function(f"old => {CANVAS.format(name)} !== old", arg=picture)
    page.get_by_text("decode, 0 prefill").wait_for()


def test_the_steps_of_one_of_several_engines_are_shown(
    tmp_path: Path, server: RunningServer, page: sync_api.Page
) -> None:
    page.goto(f"{server.url}/#dashboard")
    page.get_by_text("after warm-up").wait_for()
    assert not page.get_by_label("of engine").is_visible()
    with running_server(tmp_path, ECHO, EchoConfig(), more_engines=(EchoConfig(),)) as pair:
        page.goto(f"{pair.url}/#dashboard")
        with page.expect_request("**/ui/state?engine=1&after=-1"):
            page.get_by_label("of engine").select_option("1")
        page.goto("about:blank")


def test_a_plan_follows_the_form_and_its_link_keeps_the_choice(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(f"{server.url}/#plan")
    shown(page, "plan")
    assert "demo" in page.get_by_label("Model", exact=True).locator("option:checked").inner_text()
    page.get_by_label("Model", exact=True).select_option("8b")
    page.get_by_label("Chips", exact=True).select_option("v6e:2x4")
    page.get_by_label("Kind", exact=True).select_option("custom")
    page.get_by_label("Tokens of a prompt").fill("700")
    page.get_by_label("Groq, a million tokens in").fill("0.5")
    command = page.locator("#plan-command", has_text="--data-parallel-size 4")
    command.wait_for()
    shown(page, "plan")
    groq = page.locator("#plan-apis tr", has_text="Groq")
    assert groq.locator("td").nth(3).inner_text().startswith("+")
    figures = page.locator("#plan-tiles").inner_text()
    assert {"counted", "estimated"} == {mark.inner_text() for mark in page.locator("#plan-tiles .mark").all()}
    page.reload()
    shown(page, "plan")
    assert page.locator("#plan-tiles").inner_text() == figures
    assert page.get_by_label("Groq, a million tokens in").input_value() == "0.5"
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("link", name="Plan").click()
    sync_api.expect(page).to_have_url(re.compile("prompt_tokens=700"))


def test_a_simulation_is_stopped_and_the_estimate_stays(server: RunningServer, page: sync_api.Page) -> None:
    page.goto(f"{server.url}/#plan?model=8b&target=1xh100&workload=agents")
    shown(page, "plan")
    page.get_by_role("button", name="Simulate").click()
    page.get_by_role("progressbar").wait_for()
    page.get_by_text("trying 1 x 1 chips").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("The simulation was stopped").wait_for()
    assert page.get_by_role("button", name="Simulate").is_visible()
    assert page.locator("#plan-tiles").get_by_text("TTFT, mean").is_visible()


def test_a_plan_that_is_refused_says_why(server: RunningServer, browser: sync_api.Browser) -> None:
    page = browser.new_page()  # the browser itself writes the 400 on the console
    page.goto(f"{server.url}/#plan?model=70b&target=1xl4&workload=chat")
    page.locator("#plan-status.error").wait_for()
    assert "does not fit" in page.locator("#plan-status").inner_text()
    page.get_by_label("Model", exact=True).select_option("1b")
    shown(page, "plan")
    assert page.locator("#plan-status.error").count() == 0
    page.close()


def test_a_plan_in_a_file_opens_without_a_server(
    browser: sync_api.Browser, page: sync_api.Page, tmp_path: Path
) -> None:
    file = tmp_path / "plan.html"
    flags = ["--model", "1b", "--target", "1xl4", "--workload", "300/20", "--no-simulate", "--html", str(file)]
    subprocess.run([sys.executable, "-m", "scripts.lab", "plan", *flags], check=True, capture_output=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.locator("#plan-tiles").get_by_text("TTFT, mean").wait_for()
    assert page.get_by_label("Tokens of a prompt").input_value() == "300"
    assert page.get_by_label("Chips", exact=True).is_disabled()
    assert "scripts/serve --model" in page.locator("#plan-command").inner_text()
    assert asked == [file.as_uri()]


def test_a_key_is_asked_for_and_used(keyed_server: RunningServer, browser: sync_api.Browser) -> None:
    page = browser.new_page()  # the browser itself writes each 401 on the console
    page.goto(keyed_server.url)
    page.get_by_role("textbox", name="Key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("textbox", name="Key").fill("right")
    page.keyboard.press("Enter")
    page.get_by_text("serving", exact=True).wait_for()
    assert send(page, "abc")
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "abc" in stored  # the conversation
    assert "right" not in stored
    page.close()


keyed_server = server_of(EchoConfig(reply=tuple(b"an answer")), api_keys=("right",))
