"""The metrics page: bounded however many adapters there were, and true to the engine's records."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.config import SchedulerConfig
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.request import Request, RequestKey
from engine.telemetry.journal import Journal, JournalConfig
from engine.telemetry.records import RequestRecord
from loraplex.metrics import names
from loraplex.metrics.page import MetricsPage
from loraplex.metrics.port import serving_metrics
from loraplex.metrics.process_metrics import ProcessMetrics
from tests.support.fake_engine import FakeEngine, statistics
from tests.support.scripted_engine import EOS, ScriptedRunner
from tests.support.service import TestService, running_service
from tests.support.service_on_engine import service_on_engine
from tests.support.waiting import SECONDS, until_idle

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


def value(text: str, name: str, **labels: str) -> float:
    """The sum of the series of a name that have these labels."""
    found = [s for s in samples(text) if s.name == name and labels.items() <= s.labels.items()]
    return sum(sample.value for sample in found)


async def scrape(service: TestService, key: str = "admin") -> str:
    async with service.client(key) as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return reply.text


async def platform_key(service: TestService) -> None:
    service.keys["metrics"] = (await service.registry.create_key(None, ["metrics"])).plain


def test_every_metric_is_in_the_document_and_nothing_else():
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1]: row for row in rows}
    known = {metric.name: metric for metric in names.all_metrics()}
    assert documented.keys() == known.keys()
    for name, metric in known.items():
        _, _, kind, labels, *_ = documented[name].split("|")
        assert kind.strip() == metric.kind, name
        assert tuple(label.strip(" `") for label in labels.split(",") if label.strip(" `")) == (
            metric.labels
        ), name


async def test_the_page_has_what_the_table_promises_and_no_other_name(tmp_path):
    runner = ScriptedRunner(lambda prompt, adapter: [7, 7, EOS])
    async with service_on_engine(tmp_path, runner) as (service, engine, _):
        await service.upload("legal")
        async with service.client() as client:
            for model in ("legal", "base"):
                await client.post("/v1/completions", json={"model": model, "prompt": "hello"})
            too_long = {"model": "legal", "prompt": list(range(1, 400)) * 2, "max_tokens": 4}
            assert (await client.post("/v1/completions", json=too_long)).status_code == 400
        await until_idle(engine)
        text = await scrape(service)
    shown = {s.name for s in samples(text) if not s.name.endswith("_created")}
    assert shown <= names.series_names()
    silent = names.series_names() - shown
    assert silent <= set(names.REFUSALS.series), "a query on these would find nothing"
    assert value(text, "loraplex_requests_total", adapter="acme/legal", finish_reason="stop") == 1
    assert value(text, "loraplex_requests_total", adapter="acme/base") == 1
    assert value(text, "loraplex_adapter_load_seconds_count", adapter="acme/legal") == 1
    assert value(text, "loraplex_good_requests_total") <= 2
    assert value(text, "loraplex_engine_up") == 1
    assert value(text, "loraplex_http_requests_total", route="/v1/completions", status="400") == 1
    assert value(text, "loraplex_http_refusals_total", status="400") == 1
    assert value(text, "loraplex_step_seconds_count") == runner.num_steps


async def test_only_keys_that_may_read_metrics_and_tenants_only_their_own(tmp_path):
    runner = ScriptedRunner(lambda prompt, adapter: [EOS])
    async with service_on_engine(tmp_path, runner) as (service, engine, _):
        await platform_key(service)
        for tenant in ("acme", "zen"):
            created = await service.registry.create_key(tenant, ["metrics"])
            service.keys[f"{tenant}:metrics"] = created.plain
            await service.upload("legal", key=f"{tenant}:tenant")
            async with service.client(f"{tenant}:inference") as client:
                await client.post("/v1/completions", json={"model": "legal", "prompt": "x"})
        await until_idle(engine)
        for key, status in ((None, 401), ("acme:inference", 403), ("acme:tenant", 403)):
            async with service.client(key) as client:
                assert (await client.get("/metrics")).status_code == status
        everything = await scrape(service, "metrics")
        own = await scrape(service, "acme:metrics")
    assert "acme/legal" in everything and "zen/legal" in everything
    assert 'adapter="acme/legal"' in own
    assert "zen" not in own and 'adapter="other"' not in own and "vllm:" not in own
    assert {s.name for s in samples(own)} < {s.name for s in samples(everything)}


async def test_without_an_engine_the_page_says_so_and_what_it_knows_itself(tmp_path):
    engine = FakeEngine()
    async with running_service(tmp_path, engine) as service:
        engine.die()
        text = await scrape(service)
    assert value(text, "loraplex_engine_up") == 0
    assert value(text, "loraplex_http_requests_total") == 0  # this one was still under way
    assert "loraplex_requests_running" not in text


def used(journal: Journal, number: int) -> None:
    """An adapter is created, loaded, used, refused once, and deleted."""
    name, digest = f"adapter-{number:05}", f"{number:064x}"
    fake = FakeRequestParts(name, digest)
    journal.asked(fake.message)
    journal.slot_changed("loading", digest, number % 8)
    journal.slot_changed("resident", digest, number % 8)
    journal.request_over(fake.request, round(journal._clock() * 1e9))
    journal.refused(fake.message, "queue_full")
    journal.slot_changed("evicted", digest, number % 8)


class FakeRequestParts:
    def __init__(self, name: str, digest: str) -> None:
        self.message = EngineRequest(
            request_id=1, tenant="acme", prompt_token_ids=[1, 2, 3], adapter=digest,
            sampling=SamplingParams(max_tokens=4, seed=0), label=f"{name}@1", call="c",
        )  # fmt: skip
        self.request = Request(RequestKey(b"", 1), self.message, None, arrival_number=1)  # type: ignore[arg-type]
        self.request.waited = [1, 2, 3, 4, 5, 6]
        self.request.end_reasons.append("stop")


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_ten_thousand_adapters_leave_the_page_as_small_as_it_was(tmp_path, is_deleted):
    engine = FakeEngine()
    engine.journal = Journal(JournalConfig(max_adapters=20))
    engine.statistics = statistics()
    sizes: list[tuple[int, int]] = []
    async with running_service(tmp_path, engine) as service:
        for number in range(10_000):
            used(engine.journal, number)
            if is_deleted:
                engine.journal.forget("acme", f"adapter-{number:05}")
            if number in (100, 1000, 9_999):
                page = await scrape(service)
                sizes.append((len(list(samples(page))), len(page)))
        text = await scrape(service)
    for series_or_bytes in zip(*sizes, strict=True):
        assert max(series_or_bytes) <= 1.1 * min(series_or_bytes), sizes
    assert value(text, "loraplex_requests_total") == 10_000
    assert value(text, "loraplex_engine_refusals_total", reason="queue_full") == 10_000
    assert value(text, "loraplex_adapter_load_seconds_count") == 10_000
    labels = {s.labels["adapter"] for s in samples(text) if "adapter" in s.labels}
    assert labels == {"other"} if is_deleted else len(labels) == 21
    kept = engine.journal
    assert len(kept._owners._owners) <= 10_000 and not kept._residences and not kept._fetches


async def test_the_sums_of_the_series_are_those_of_the_records_and_a_client_sees_the_same(tmp_path):
    """500 requests of two tenants for five adapters on two slots: some end by themselves, some at
    their limit, some are cut at a stop string, some preempted."""
    runner = ScriptedRunner()
    config = SchedulerConfig(
        num_kv_blocks=24, max_num_seqs=8, max_loras=2, max_model_len=512, max_num_batched_tokens=64
    )
    async with service_on_engine(tmp_path, runner, config=config) as (service, engine, _):
        said = service.tokenizer.encode("numbers 0 1 2 3 4 5 6", False)

        def reply(prompt: Sequence[int], adapter: str | None) -> Sequence[int]:
            return said * 3 if sum(prompt) % 3 else said[:5]

        runner.reply = reply
        for tenant, count in (("acme", 3), ("zen", 2)):
            for number in range(count):
                await service.upload(f"a{number}", seed=number, key=f"{tenant}:tenant")
        clients = {tenant: service.client(f"{tenant}:inference") for tenant in ("acme", "zen")}
        models = [("acme", "a0"), ("acme", "a1"), ("acme", "a2"), ("acme", "base"),
                  ("zen", "a0"), ("zen", "a1"), ("zen", "base")]  # fmt: skip
        told: dict[str, dict[str, float]] = {}
        limit = asyncio.Semaphore(24)

        async def ask(number: int) -> None:
            tenant, model = models[number % len(models)]
            body = {"model": model, "prompt": f"{number} " * (1 + number % 7), "max_tokens": 20}
            if number % 5 == 0:
                body["stop"] = " 1 "
            async with limit:
                answer = await clients[tenant].post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            queue = answer.headers["x-loraplex-queue"]
            parts = dict(part.split("=") for part in queue.split("; ") if part)
            told[answer.json()["id"]] = {cause: float(ms) for cause, ms in parts.items()}

        await asyncio.gather(*(ask(number) for number in range(500)))
        for client in clients.values():
            await client.aclose()
        await until_idle(engine)
        records: list[RequestRecord] = []
        cursor = None
        while True:
            answer = await engine.telemetry(cursor, limit=200)
            records += answer.requests
            cursor = answer.cursor
            assert answer.missed == 0
            if not answer.has_more:
                break
        text = await scrape(service)
        asked = Counter(models[number % len(models)][0] for number in range(500))
        rows = [row for tenant in asked for row in await service.usage(tenant, asked[tenant])]
    assert len(records) == len(rows) == len(told) == 500
    usage = {row.request_id: row for row in rows}
    for kept in records:
        row = usage[kept.call]
        assert row.queue_seconds == pytest.approx(kept.queue_seconds, abs=1e-9)
        assert (row.tenant, row.adapter, row.version) == (kept.tenant, kept.adapter, kept.version)
        assert row.prompt_tokens == kept.prompt_tokens and row.cached_tokens == kept.cached_tokens
        assert row.output_tokens == kept.output_tokens, kept
        assert row.finish_reason == ",".join(sorted(set(kept.finish_reasons)))
        milliseconds = {cause: round(s * 1000, 3) for cause, s in kept.queue.items()}
        assert told[kept.call] == pytest.approx(milliseconds, abs=0.0011)
        waited = _waited(kept)
        assert kept.queue_seconds == pytest.approx(waited, abs=2e-9), "the causes are the whole"
    for tenant, model in models:
        adapter = f"{tenant}/{model}"
        mine = [r for r in records if (r.tenant, r.adapter or "base") == (tenant, model)]
        assert value(text, "loraplex_requests_total", adapter=adapter) == len(mine) > 60
        for name, read in (
            ("prompt_tokens", lambda r: r.prompt_tokens),
            ("cached_tokens", lambda r: r.cached_tokens),
            ("output_tokens", lambda r: r.output_tokens),
            ("preemptions", lambda r: r.preemptions),
        ):
            shown = value(text, f"loraplex_{name}_total", adapter=adapter)
            assert shown == sum(map(read, mine)), name
        whole = value(text, "loraplex_queue_total_seconds_sum", adapter=adapter)
        causes = value(text, "loraplex_queue_seconds_sum", adapter=adapter)
        assert whole == pytest.approx(causes) == pytest.approx(sum(r.queue_seconds for r in mine))
    by_reason = {r.finish_reason for r in records}
    assert by_reason == {"stop", "length"}


def _waited(kept: RequestRecord) -> float:
    """Queue time as the timeline has it: from `queued` or `preempted` to the next `prefill`."""
    waited, since = 0.0, None
    for at, state in kept.timeline:
        if state in ("queued", "preempted"):
            since = at
        elif state == "prefill" and since is not None:
            waited, since = waited + at - since, None
    return waited


async def test_the_loopback_port_serves_the_page_without_a_key(tmp_path):
    async with running_service(tmp_path) as service:
        page: MetricsPage = service.app.state.metrics_page
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with (
                serving_metrics(lambda: page, listener),
                httpx.AsyncClient(base_url=url) as client,
            ):
                shown = await client.get("/metrics")
                assert shown.status_code == 200 and "loraplex_engine_up 0.0" in shown.text
                wanted = {"accept": "application/openmetrics-text; version=1.0.0"}
                opened = await client.get("/metrics", headers=wanted)
                assert opened.text.endswith("# EOF\n")
                assert (await client.get("/v1/models")).status_code == 404
                assert (await client.post("/metrics")).status_code == 404


def test_what_clients_make_up_has_no_series_of_its_own():
    counts = ProcessMetrics()
    for number in range(1000):
        counts.refused(f"reason-{number}", 400)
        counts.replied(f"METHOD{number}", "/v1/models", 405)
    (family,) = [f for f in counts.registry.collect() if "requests" in f.name]
    assert [s.value for s in family.samples if s.name.endswith("_total")] == [1000]
    (family,) = [f for f in counts.registry.collect() if "refusals" in f.name]
    series = [s for s in family.samples if s.name.endswith("_total")]
    assert len(series) == 201 and sum(s.value for s in series) == 1000


async def test_what_gateways_read_names_adapters_as_clients_do(tmp_path):
    step = threading.Event()
    runner = ScriptedRunner(
        lambda prompt, adapter: [7] * 400, before_step=lambda batch: step.wait(0.01) and None
    )
    config = SchedulerConfig(num_kv_blocks=256, max_num_seqs=1, max_loras=1, max_model_len=512)
    async with service_on_engine(tmp_path, runner, threaded=True, config=config) as (
        service, engine, _,
    ):  # fmt: skip
        for seed, name in enumerate(("legal", "poet")):
            await service.upload(name, seed=seed)
        async with service.client() as client:
            asked = [
                asyncio.create_task(
                    client.post(
                        "/v1/completions",
                        json={"model": name, "prompt": "x", "max_tokens": 400},
                    )
                )
                for name in ("legal", "poet")
            ]
            async with asyncio.timeout(SECONDS):
                while True:
                    stats = await engine.stats()
                    if stats.running and stats.waiting:
                        break
            text = await scrape(service)
            step.set()
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    (info,) = [s for s in samples(text) if s.name == "vllm:lora_requests_info"]
    running, waiting = (info.labels[f"{kind}_lora_adapters"] for kind in ("running", "waiting"))
    assert {running, waiting} == {"legal", "poet"} and info.labels["max_lora"] == "1"
    assert info.value > 1e9
    assert 0 < value(text, "vllm:kv_cache_usage_perc") == value(text, "vllm:gpu_cache_usage_perc")
    assert value(text, "vllm:num_requests_running", model_name="scripted") == 1


async def test_pages_asked_for_together_ask_the_engine_once(tmp_path, monkeypatch):
    async with running_service(tmp_path) as service:
        service.keys["acme:metrics"] = (
            await service.registry.create_key("acme", ["metrics"])
        ).plain
        service.engine.statistics = statistics()
        ask, answer, is_asked = service.engine.telemetry, asyncio.Event(), asyncio.Event()
        num_asked = 0

        async def slow(*args, **options):
            nonlocal num_asked
            num_asked += 1
            is_asked.set()
            await answer.wait()
            return await ask(*args, **options)

        monkeypatch.setattr(service.engine, "telemetry", slow)
        page: MetricsPage = service.app.state.metrics_page
        async with asyncio.TaskGroup() as group:
            gone = group.create_task(scrape(service))
            await is_asked.wait()
            together = [group.create_task(page.render("")) for _ in range(20)]
            together += [group.create_task(page.render_for("acme", "")) for _ in range(20)]
            await asyncio.sleep(0)
            gone.cancel()
            answer.set()
        assert num_asked == 1
        assert all(b"loraplex" in task.result().body for task in together[:20])
        await scrape(service, "acme:metrics")
        assert num_asked == 2
