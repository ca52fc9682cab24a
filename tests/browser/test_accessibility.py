"""axe-core's rules on every page, with data, in light and in dark."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, Scheme

PAGES = ("", "/adapters", "/adapters/acme/legal", "/slots", "/batch", "/alerts")


def serious(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: OpenPage, scheme: Scheme):
    page = open_page("/?range=5m", scheme=scheme)
    for path in PAGES:
        page.goto(f"/dashboard{path}?range=5m")
        page.get_by_role("contentinfo").wait_for()
        expect(page.locator(".panel, .tall, .bar-above").first).to_be_visible()
        if path == "/adapters":
            page.locator(".columns summary").click()
        assert serious(page) == [], path
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Key")).to_be_visible()
    assert serious(page) == []
