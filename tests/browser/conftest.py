"""One browser, and one service under load, for all browser tests."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Playwright,
    ViewportSize,
    expect,
    sync_playwright,
)

from tests.support.chromium import FLAGS, NoChromium, find_chromium
from tests.support.dashboard_service import DashboardService, dashboard_service

TENANTS = ("acme", "zen")
ADAPTERS = [("acme", "support"), ("acme", "legal"), ("acme", "sql-writer"), ("zen", "triage")]
SIZES: dict[str, ViewportSize] = {
    "desktop": {"width": 1440, "height": 900},
    "laptop": {"width": 1280, "height": 800},
    "phone": {"width": 390, "height": 844},
}
Scheme = Literal["light", "dark"]


@pytest.fixture(scope="module")
def playwright() -> Generator[Playwright]:
    """Playwright's driver: it runs a loop in this thread, so it ends before other files' tests."""
    expect.set_options(timeout=60_000)  # not its five seconds, on a machine with much to do
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Generator[Browser]:
    try:
        chromium = find_chromium(Path(playwright.chromium.executable_path))
    except NoChromium as error:
        pytest.fail(str(error))
    launched = playwright.chromium.launch(
        executable_path=chromium.program, args=list(FLAGS), env=dict(chromium.variables) or None
    )
    yield launched
    launched.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[DashboardService]:
    """A service with more adapters than slots, each called ten times, more at once than run."""
    with dashboard_service(tmp_path_factory.mktemp("dashboard"), TENANTS) as running:
        for number, (tenant, name) in enumerate(ADAPTERS):
            assert running.publish(tenant, name, number) == 1
        calls = [
            (tenant, name) for _ in range(10) for tenant, name in [*ADAPTERS, ("acme", "base")]
        ]
        running.ask(calls, stops=True, at_once=16)
        yield running


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, world: DashboardService) -> Generator[OpenPage]:
    """Open a path of the dashboard, logged in with a key (the admin's by default).

    At the end no page may have thrown, or tried what its Content-Security-Policy forbids.
    """
    faults: list[str] = []
    contexts: list[BrowserContext] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def open_path(
        path: str, *, key: str | None = None, size: str = "desktop", scheme: Scheme = "light"
    ) -> Page:
        context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, base_url=world.url)
        contexts.append(context)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"/dashboard{path}")
        page.get_by_label("Key").fill(key or world.service.admin_key)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("navigation", name="Pages").wait_for()
        return page

    yield open_path
    for context in contexts:
        context.close()
    assert faults == []
