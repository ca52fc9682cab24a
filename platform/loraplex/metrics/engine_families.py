"""The engine as a whole, as metrics; also under the names that vLLM's have."""

from collections.abc import Iterator
from itertools import chain

from prometheus_client.metrics_core import Metric as Family

from engine.engine_info import EngineInfo
from engine.engine_stats import EngineStats, QueueStats
from engine.telemetry import buckets
from engine.telemetry.labels import name_of
from engine.telemetry.records import EngineTotals
from loraplex.metrics import names
from loraplex.metrics.adapter_families import adapter_families
from loraplex.metrics.families import counter, gauge, histogram

_NONE: tuple[str, ...] = ()


def engine_families(
    stats: EngineStats, totals: EngineTotals, info: EngineInfo, now: float
) -> Iterator[Family]:
    """All that the engine tells; `now`: Unix time."""
    return chain(
        adapter_families(totals.adapters),
        _sums(stats, totals),
        _levels(stats, totals),
        _vllm(stats, info, now),
    )


def _sums(stats: EngineStats, totals: EngineTotals) -> Iterator[Family]:
    yield counter(
        names.STEP_PARTS, {(part,): seconds for part, seconds in totals.step_parts.items()}
    )
    for metric, bounds, value in (
        (names.STEP_SECONDS, buckets.STEP_SECONDS, totals.step_seconds),
        (names.STEP_ROWS, buckets.STEP_ROWS, totals.step_rows),
        (names.STEP_TOKENS, buckets.STEP_TOKENS, totals.step_tokens),
        (names.STEP_ADAPTERS, buckets.STEP_ADAPTERS, totals.step_adapters),
    ):
        yield histogram(metric, bounds, {_NONE: value})
    yield counter(names.PREFIX_QUERIES, {_NONE: stats.prompt_tokens})
    yield counter(names.PREFIX_HITS, {_NONE: stats.cached_tokens})


def _levels(stats: EngineStats, totals: EngineTotals) -> Iterator[Family]:
    for metric, value in (
        (names.ENGINE_START, totals.started),
        (names.SLO_TTFT, totals.objective.ttft),
        (names.SLO_PER_TOKEN, totals.objective.seconds_per_token),
        (names.RUNNING, stats.running),
        (names.WAITING, stats.waiting),
        (names.KV_USED, stats.kv_blocks_used),
        (names.KV_TOTAL, stats.kv_blocks_total),
        (names.SLOTS_USED, stats.slots_used),
        (names.SLOTS_TOTAL, stats.slots_total),
        (names.HOST_ADAPTERS, stats.host_adapters),
        (names.HOST_BYTES, stats.host_adapter_bytes),
    ):
        yield gauge(metric, {_NONE: value})


def _vllm(stats: EngineStats, info: EngineInfo, now: float) -> Iterator[Family]:
    """What the Gateway API inference extension and others of its kind read of a vLLM server."""
    model = (info.model,)
    usage = stats.kv_blocks_used / stats.kv_blocks_total
    running = _names(queue for queue in stats.queues if queue.running)
    waiting = _names(queue for queue in stats.queues if queue.waiting)
    yield gauge(names.VLLM_LORA, {(str(stats.slots_total), running, waiting): now})
    yield gauge(names.VLLM_RUNNING, {model: stats.running})
    yield gauge(names.VLLM_WAITING, {model: stats.waiting})
    yield gauge(names.VLLM_KV, {model: usage})
    yield gauge(names.VLLM_GPU_KV, {model: usage})
    yield gauge(names.VLLM_CACHE, {(str(info.block_size), str(info.num_kv_blocks)): 1.0})


def _names(queues: Iterator[QueueStats]) -> str:
    """Adapters as clients name them in `model`, which a gateway compares: without tenant."""
    return ",".join(sorted({name_of(queue.label) for queue in queues if queue.adapter}))
