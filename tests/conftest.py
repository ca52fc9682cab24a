"""Fixtures for every test: one async backend, few threads, and nothing of the developer's own."""

import os
import signal

import pytest

# Before torch and tokenizers are imported: two test processes must fit on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Before Triton is imported: kernels run in its interpreter, but for `pytest -m gpu`.

    And Ctrl-C means what it does in a terminal, also where a shell runs this in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") == "gpu":
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_ambient_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own LORAPLEX_* settings must not reach a test; the weights cache may."""
    for name in list(os.environ):
        if name.startswith("LORAPLEX_") and name != "LORAPLEX_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.delenv("DATABASE_URL", raising=False)


pytest_plugins = [
    "tests.support.databases", "tests.support.rates", "tests.support.redis_server",
    "tests.support.s3",
]  # fmt: skip
