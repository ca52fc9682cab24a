"""The dashboard in a browser, on a real service that has been under load."""

import csv
import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.support.dashboard_service import SECRET, DashboardService

SECONDS = 20_000
"""Milliseconds: how long to wait for what the recorder writes within a few seconds."""
PAGES = ("", "/adapters", "/adapters/acme/legal", "/slots", "/batch", "/alerts")


def names(page: Page) -> list[str]:
    return page.locator("table.adapters tbody th").all_text_contents()


def test_a_wrong_key_is_told_and_a_right_one_opens_the_page_that_was_asked_for(
    open_page: OpenPage, world: DashboardService
):
    page = open_page("/adapters?range=5m&sort=requests")
    expect(page).to_have_title("Adapters · Loraplex")
    expect(page).to_have_url(re.compile(r"sort=requests"))
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Key").fill("x" * 40)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_have_text("This key is not known.")


def test_adapters_are_sorted_and_searched_and_the_url_keeps_both(open_page: OpenPage):
    page = open_page("/adapters?range=5m")
    expect(page.locator("table.adapters tbody tr")).to_have_count(5, timeout=SECONDS)
    page.get_by_role("columnheader", name="adapter", exact=True).get_by_role("button").click()
    expect(page).to_have_url(re.compile(r"sort=adapter&order=asc"))
    expect(page.locator("table.adapters [aria-sort=ascending]")).to_have_text(re.compile("adapter"))
    expect(page.locator("table.adapters tbody th").first).to_have_text("acme/base")
    assert names(page) == sorted(names(page))
    page.keyboard.press("/")
    page.keyboard.type("SQL")
    expect(page.locator("table.adapters tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("table.adapters tbody tr")).to_have_count(1)
    expect(page.get_by_label("Search adapters")).to_have_value("SQL")
    page.get_by_role("link", name="acme/sql-writer").click()
    expect(page.get_by_role("heading", name="acme/sql-writer")).to_be_visible()
    page.go_back()
    expect(page.get_by_label("Search adapters")).to_have_value("SQL")
    page.get_by_label("Search adapters").fill("nobody's")
    expect(page.get_by_role("status").filter(has_text="None of")).to_be_visible()


def test_columns_are_chosen_by_keyboard_and_remembered_and_the_csv_has_all(open_page: OpenPage):
    page = open_page("/adapters?range=5m", size="laptop")
    headings = page.locator("table.adapters thead th")
    expect(headings).to_have_text(
        ["adapter", "now", re.compile("queue p95, worst cause"), "p95 over time",
         "waited, by cause", "first token p95", "per token p95", "load p95", "requests", "length"],
        timeout=SECONDS,
    )  # fmt: skip
    table = page.get_by_role("region", name="Adapters, table")
    assert table.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    choice = page.get_by_role("group", name="Columns of the table")
    page.get_by_label("Search adapters").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(choice.get_by_label("queue p95 (the order)")).to_be_disabled()  # the order
    page.keyboard.press("Tab")
    expect(choice.get_by_label("state now")).to_be_focused()
    page.keyboard.press("Space")
    choice.get_by_label("endings", exact=True).focus()
    page.keyboard.press("Space")
    page.keyboard.press("Escape")
    expect(choice).to_be_hidden()
    page.reload()
    expect(page.locator("table.adapters tbody svg.bar").first).to_be_visible()
    shown = headings.all_text_contents()
    assert "now" not in shown and "endings" in shown
    page.goto("/dashboard/adapters?range=5m&sort=output_tokens")
    expect(page.locator("table.adapters [aria-sort]")).to_have_text(re.compile("output tokens"))
    heading = next(csv.reader(page.request.get(csv_link(page)).text().splitlines()))
    assert {"queue_p50", "queue_slot", "token_time_p95", "length", "kept"} <= set(heading)
    page.locator(".columns summary").click()
    page.get_by_role("button", name="All", exact=True).click()
    expect(headings).to_have_count(18)
    page.get_by_role("button", name="The usual ones").click()
    expect(headings).to_have_count(11)  # and that of the order
    page.get_by_label("Search adapters").click()
    expect(choice).to_be_hidden()


def csv_link(page: Page) -> str:
    return page.get_by_role("link", name="All adapters found as CSV").get_attribute("href") or ""


def test_the_causes_of_an_adapter_add_up_to_the_queue_time_that_replies_told(
    open_page: OpenPage, world: DashboardService
):
    told = world.queue_seconds("acme/legal")
    assert sum(told.values()) > 0.01, told
    page = open_page("/adapters/acme/legal?range=5m")
    calls = page.locator(".tile").filter(has=page.get_by_text("requests", exact=True))
    expect(calls.locator(".value")).to_have_text("10", timeout=SECONDS)
    rows = page.locator("table.causes tbody tr[data-cause]")
    shown = {
        row.get_attribute("data-cause"): float(row.get_attribute("data-seconds") or "nan")
        for row in rows.all()
    }
    assert shown == pytest.approx({k: v for k, v in told.items() if v > 0}, rel=0.01, abs=1e-4)
    assert sum(shown.values()) == pytest.approx(sum(told.values()), rel=0.01)
    # What the chart stacks is the same, bucket by bucket: its table alternative has each value.
    view = page.request.get("/dashboard/api/adapters/acme/legal?range=5m").json()
    stacked = sum(value or 0 for column in view["causes"].values() for value in column)
    assert stacked == pytest.approx(sum(told.values()), rel=0.01)
    page.get_by_role("button", name="summed").click()
    page.get_by_role("button", name="Queue time by cause as a table").click()
    table = page.get_by_role("region", name="Queue time by cause, table")
    expect(table.locator("tbody tr")).to_have_count(len(view["window"]["times"]))
    assert table.locator("thead th").all_text_contents() == [
        "time", "quota", "load", "slot", "kv", "budget", "turn",
    ]  # fmt: skip


def test_slow_requests_show_their_states_and_no_words(open_page: OpenPage, world: DashboardService):
    page = open_page("/adapters/acme/legal?range=5m")
    rows = page.locator("table.requests tbody tr")
    expect(rows.first).to_be_visible(timeout=SECONDS)
    ids = {reply.call for reply in world.replies["acme/legal"]}
    assert {row.get_attribute("data-request") for row in rows.all()} <= ids
    states = rows.first.locator("svg.timeline").get_attribute("aria-label") or ""
    assert re.match(r"queued at 0 s, .*prefill at .*decode at .*done at ", states)
    for path in PAGES:
        page.goto(f"/dashboard{path}?range=5m")
        page.get_by_role("contentinfo").wait_for()
        assert SECRET not in page.content()
    for route in ("adapters/acme/legal", "overview", "batch", "slots", "alerts", "adapters"):
        assert SECRET not in page.request.get(f"/dashboard/api/{route}?range=5m").text()


@pytest.mark.slow
def test_a_version_that_never_stops_is_called_out(open_page: OpenPage, world: DashboardService):
    world.ask([("acme", "support")] * 40, stops=True)
    page = open_page("/adapters/acme/support?range=5m")
    expect(page.get_by_role("heading", name="acme/support")).to_be_visible()
    assert page.locator(".callout").count() == 0
    assert world.publish("acme", "support", 60) == 2
    world.ask([("acme", "support")] * 40, stops=False)
    callout = page.locator('.callout[data-version="2"]')
    expect(callout).to_be_visible(timeout=SECONDS)
    expect(callout).to_contain_text("Version 2 does not stop")
    expect(callout).to_contain_text("100 % of its replies run into their token limit")
    expect(callout).to_contain_text("of version 1 it was 0 %")
    versions = page.get_by_role("region", name="Versions, table").locator("tbody tr")
    expect(versions.first).to_contain_text("@2")
    expect(versions.first).to_contain_text("default")


@pytest.mark.slow
def test_a_page_says_when_the_server_is_gone_and_recovers(
    open_page: OpenPage, world: DashboardService
):
    page = open_page("/?range=5m")
    state = page.locator(".connection")
    expect(state).to_have_attribute("data-state", "open", timeout=SECONDS)
    world.api_process().kill()
    expect(state).to_have_attribute("data-state", "lost", timeout=SECONDS)
    expect(page.locator(".banner")).to_contain_text("Disconnected since")
    expect(state).to_have_attribute("data-state", "open", timeout=60_000)
    expect(page.locator(".banner")).to_have_count(0)
    expect(page.locator(".tiles .tile").first).to_be_visible()


def test_a_tenant_sees_its_own_adapters_only(open_page: OpenPage, world: DashboardService):
    page = open_page("/adapters?range=5m", key=world.keys["zen"])
    expect(page.locator("table.adapters tbody th")).to_have_text(["zen/triage"], timeout=SECONDS)
    page.goto("/dashboard/adapters/acme/legal")
    expect(page.get_by_role("alert")).to_contain_text("nothing here that this session may see")
    for path in ("/slots", "/batch", "/alerts", ""):
        page.goto(f"/dashboard{path}?range=5m")
        page.get_by_role("contentinfo").wait_for()
        page.locator(".panel, .bar-above").first.wait_for()
        assert "acme" not in page.content()
    assert page.get_by_text("KV blocks").count() == 0  # the engine's own


def test_who_has_nothing_yet_is_told_so_on_every_page(open_page: OpenPage, world: DashboardService):
    with world.client(world.service.admin_key) as http:
        http.post("/admin/tenants", json={"name": "newcomer"}).raise_for_status()
        made = http.post("/admin/tenants/newcomer/keys", json={"scopes": ["tenant"]})
        page = open_page("/?range=5m", key=made.raise_for_status().json()["key"])
        expect(page.locator("#page")).to_contain_text("No request waited.")
        for path, said in (
            ("/adapters", "There is no adapter yet, and the base was not called."),
            ("/slots", "Nobody waits."),
            ("/alerts", "Nothing is wrong"),
            ("/adapters/newcomer/base", "No request waited."),
        ):
            page.goto(f"/dashboard{path}?range=5m")
            expect(page.locator("#page")).to_contain_text(said)
            assert not re.search("NaN|undefined|null|Infinity", page.inner_text("#page"))
        http.delete("/admin/tenants/newcomer").raise_for_status()


def test_a_tenant_sees_its_quota_and_what_it_uses_of_it(
    open_page: OpenPage, world: DashboardService
):
    with world.client(world.service.admin_key) as http:
        limits = {"max_adapters": 4, "requests_per_minute": 50}
        http.put("/admin/tenants/zen/quota", json=limits).raise_for_status()
        world.ask([("zen", "triage")] * 2, stops=True)
        page = open_page("/?range=5m", key=world.keys["zen"])
        quota = page.get_by_role("region", name="Your quota")
        expect(quota.locator("tr[data-quota=max_adapters]")).to_contain_text(
            re.compile("adapters.*1.*4")
        )
        used = re.compile("^[12]$")  # where a minute ended meanwhile it fades
        expect(quota.locator("tr[data-quota=requests_per_minute] td").first).to_have_text(used)
        http.put("/admin/tenants/zen/quota", json={}).raise_for_status()


@pytest.mark.slow
def test_a_pinned_adapter_is_told_in_the_table_on_its_page_and_at_its_slot(
    open_page: OpenPage, world: DashboardService
):
    with world.client(world.service.admin_key) as http:
        residency = "/t/acme/v1/adapters/sql-writer/residency"
        http.put(residency, json={"residency": "pinned"}).raise_for_status()
        page = open_page("/slots?range=5m")
        slot = page.get_by_role("region", name="Slots now, table").locator("tr", has_text="sql-wr")
        expect(slot.first).to_contain_text("pinned", timeout=SECONDS)
        page.goto("/dashboard/adapters?range=5m&q=sql-writer")
        expect(page.locator("table.adapters tbody tr")).to_contain_text("pinned")
        page.get_by_role("link", name="acme/sql-writer").click()
        expect(page.locator(".tiles")).to_contain_text("pinned")
        http.put(residency, json={"residency": "auto"}).raise_for_status()


def test_a_revoked_key_ends_the_page(open_page: OpenPage, world: DashboardService):
    with world.client(world.service.admin_key) as http:
        made = http.post("/admin/tenants/zen/keys", json={"scopes": ["tenant"]}).json()
        page = open_page("/?range=5m", key=made["key"])
        expect(page.locator(".connection")).to_have_attribute("data-state", "open", timeout=SECONDS)
        http.delete(f"/admin/tenants/zen/keys/{made['id']}").raise_for_status()
    expect(page.get_by_label("Key")).to_be_visible(timeout=SECONDS)
    expect(page.get_by_role("status")).to_contain_text("The session is over")


@pytest.mark.slow
def test_every_csv_link_leads_to_a_table(open_page: OpenPage):
    page = open_page("/?range=5m")
    for path in PAGES:
        page.goto(f"/dashboard{path}?range=5m")
        page.get_by_role("contentinfo").wait_for()
        expect(page.get_by_role("link", name=re.compile("as CSV$")).first).to_be_visible()
        links = page.get_by_role("link", name=re.compile("as CSV$")).all()
        for link in {link.get_attribute("href") or "" for link in links}:
            reply = page.request.get(link)
            assert reply.status == 200, link
            assert "text/csv" in reply.headers["content-type"], link
            header = next(csv.reader(reply.text().splitlines()))
            assert len(header) > 1, link


def test_pages_can_be_used_by_keyboard_and_the_theme_is_kept(open_page: OpenPage):
    page = open_page("/?range=5m")
    chart = page.get_by_role("img", name=re.compile("^Tokens, newest values")).first
    expect(chart).to_be_visible(timeout=SECONDS)
    time = chart.locator(".u-legend tr").first
    expect(time).to_contain_text("newest")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(time).to_contain_text(re.compile(r"\d\d:\d\d:\d\d"))
    page.get_by_label("Colours").select_option("dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    page.get_by_role("contentinfo").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    expect(page.get_by_label("Colours")).to_have_value("dark")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the page's content")).to_be_focused()


def test_nothing_is_wider_than_a_phone(open_page: OpenPage):
    page = open_page("/?range=5m", size="phone")
    for path in PAGES:
        page.goto(f"/dashboard{path}?range=5m")
        page.get_by_role("contentinfo").wait_for()
        page.locator(".panel, .tall, .bar-above").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
    page.goto("/dashboard/adapters?range=5m")
    page.locator("table.adapters tbody tr").first.wait_for()
    cells = page.locator("table.adapters tbody td:visible").evaluate_all(
        "cells => cells.map(cell => cell.getBoundingClientRect().right)"
    )
    assert cells
    assert max(cells) <= 390  # no column is cut: a row is a card
    expect(page.locator('td[data-label="longest gap p95"]')).to_have_count(5)  # it has them all
    expect(page.locator(".columns summary")).to_be_hidden()
    page.get_by_label("sorted by").select_option("adapter asc")
    expect(page).to_have_url(re.compile("sort=adapter&order=asc"))


@pytest.mark.slow
def test_tiles_stand_in_one_row_on_a_small_desktop(open_page: OpenPage):
    page = open_page("/?range=5m", size="laptop")
    for path in ("", "/adapters/acme/legal"):
        page.goto(f"/dashboard{path}?range=5m")
        page.locator(".tile").first.wait_for()
        tops = page.locator(".tile").evaluate_all(
            "tiles => tiles.map(tile => tile.getBoundingClientRect().top)"
        )
        assert len(tops) == 8
        assert len(set(tops)) == 1, path


def test_an_answer_that_fails_is_told_and_can_be_tried_again(open_page: OpenPage):
    page = open_page("/alerts?range=5m")
    page.route("**/dashboard/api/slots?*", lambda route: route.fulfill(status=503, json={}))
    page.get_by_role("link", name="Slots").click()
    expect(page.get_by_role("alert")).to_contain_text("The service answered with 503")
    page.unroute("**/dashboard/api/slots?*")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Slots over time")).to_be_visible()


def test_files_of_the_pages_are_public_and_data_is_not(world: DashboardService):
    with httpx.Client(base_url=world.url) as http:
        assert http.get("/dashboard").status_code == 200
        for path in ("overview", "adapters", "events", "session", "export/adapters.csv"):
            assert http.get(f"/dashboard/api/{path}").status_code == 401, path
