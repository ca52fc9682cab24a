"""The dashboard's files: whole, free of inline code, and served as a browser must get them."""

import hashlib
import re
from collections.abc import Iterator
from typing import get_args

import pytest
from litestar import Litestar
from litestar.testing import TestClient

from engine.scheduling.wait_causes import WaitCause
from loraplex.dashboard.pages import STATIC_DIR, dashboard_pages
from loraplex.front_door import front_door
from loraplex.reports.chart import chart
from loraplex.reports.plots import BarPlot

VENDOR = STATIC_DIR / "vendor"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient[Litestar]]:
    with TestClient(Litestar([dashboard_pages()], openapi_config=None)) as made:
        yield made


def test_vendored_files_are_what_their_checksums_say_and_each_library_has_its_licence():
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = {name: expected for expected, name in (line.split("  ") for line in lines)}
    files = {path.name for path in VENDOR.iterdir()} - {"SHA256SUMS"}
    assert sums.keys() == files
    for name, expected in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected, name
    assert {name for name in files if name.endswith("LICENSE.txt")} == {
        "htm-LICENSE.txt", "preact-LICENSE.txt", "uplot-LICENSE.txt",
    }  # fmt: skip


def test_the_document_is_answered_for_every_page_and_allows_no_inline_code(
    client: TestClient[Litestar],
):
    for path in ("/dashboard", "/dashboard/", "/dashboard/adapters/acme/a.b", "/dashboard/slots"):
        reply = client.get(path)
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", reply.text)


def test_every_file_that_the_pages_name_exists(client: TestClient[Litestar]):
    document = client.get("/dashboard").text
    named = set(re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', document))
    assert len(named) > 4
    for source in STATIC_DIR.glob("*.js"):
        for imported in re.findall(r'from "\./([^"]+)"', source.read_text()):
            named.add(f"/dashboard/static/{imported}")
    for path in sorted(named):
        assert client.get(path).status_code == 200, path


def test_a_file_is_sent_again_only_when_it_changed(client: TestClient[Litestar]):
    reply = client.get("/dashboard/static/main.js")
    assert reply.headers["content-type"].startswith("text/javascript")
    assert reply.headers["cache-control"] == "no-cache"
    again = {"if-none-match": reply.headers["etag"]}
    assert client.get("/dashboard/static/main.js", headers=again).status_code == 304
    assert client.get("/dashboard/static/live.js", headers=again).status_code == 200


@pytest.mark.parametrize(
    "path", ["static/none.js", "static/%2e%2e/pages.py", "static/vendor/", "static/", "api/none"]
)
def test_what_is_no_page_is_not_found(client: TestClient[Litestar], path: str):
    assert client.get(f"/dashboard/{path}").status_code == 404


def test_no_file_of_ours_sets_markup_from_text():
    for source in STATIC_DIR.glob("*.js"):
        text = source.read_text()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in text, (source.name, forbidden)


def test_a_cause_has_the_same_colour_in_the_dashboard_and_in_a_report():
    in_pages = dict(
        re.findall(r"--cause-(\w+): (#\w+);", (STATIC_DIR / "colors.css").read_text())[:6]
    )
    assert in_pages.keys() == set(get_args(WaitCause))
    bars = [("acme/legal", [1.0] * len(in_pages))]
    drawn = chart(BarPlot(x_label="ms", parts=list(in_pages), bars=bars))
    for cause, colour in in_pages.items():
        assert f"--{cause}:{colour}" in drawn
        assert drawn.count(f'fill="var(--{cause})"') == 2  # in the legend, and in the bar


def test_the_root_leads_a_browser_to_the_dashboard_and_tells_a_program_what_there_is():
    with TestClient(Litestar([front_door], openapi_config=None)) as client:
        browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        reply = client.get("/", headers=browser, follow_redirects=False)
        assert reply.status_code == 303
        assert reply.headers["location"] == "/dashboard"
        places = client.get("/", headers={"accept": "*/*"}).json()
        assert {"/dashboard", "/docs", "/v1"} <= set(places.values())
