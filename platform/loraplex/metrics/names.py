"""Every metric by name: what it counts, in which unit, by which labels.

The page is made from these, the table in docs/metrics.md is checked against them, and so are the
queries of dashboards and alert rules.
"""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One family. Names are as Prometheus shows them; those of counters end in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries can use."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))


_ADAPTER = ("adapter",)

# By adapter: from the engine's totals. `adapter` is `tenant/name`, `tenant/base`, or `other`.
QUEUE_SECONDS = Metric(
    "loraplex_queue_seconds", "histogram",
    "Queue time of requests by cause of waiting; of requests that waited for it.",
    ("adapter", "cause"),
)  # fmt: skip
QUEUE_TOTAL_SECONDS = Metric(
    "loraplex_queue_total_seconds", "histogram", "Queue time of requests, over all causes.",
    _ADAPTER,
)  # fmt: skip
TTFT_SECONDS = Metric(
    "loraplex_time_to_first_token_seconds", "histogram",
    "From a request's arrival in the engine to its first token.", _ADAPTER,
)  # fmt: skip
SECONDS_PER_TOKEN = Metric(
    "loraplex_time_per_output_token_seconds", "histogram",
    "Mean time between two tokens of a request.", _ADAPTER,
)  # fmt: skip
REQUEST_SECONDS = Metric(
    "loraplex_request_seconds", "histogram",
    "From a request's arrival in the engine to its end.", _ADAPTER,
)  # fmt: skip
LOAD_SECONDS = Metric(
    "loraplex_adapter_load_seconds", "histogram",
    "What a load into a slot took, the way to host memory included, waiting for a slot not.",
    _ADAPTER,
)  # fmt: skip
RESIDENT_SECONDS = Metric(
    "loraplex_slot_residency_seconds_total",
    "counter",
    "Time in slots; adapters with the same files are there together.",
    _ADAPTER,
)
PROMPT_TOKENS = Metric(
    "loraplex_prompt_tokens_total", "counter", "Prompt tokens, cached ones included.", _ADAPTER
)
CACHED_TOKENS = Metric(
    "loraplex_cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", _ADAPTER
)
OUTPUT_TOKENS = Metric("loraplex_output_tokens_total", "counter", "Generated tokens.", _ADAPTER)
REQUESTS = Metric(
    "loraplex_requests_total", "counter",
    "Requests that are over, by how they ended: stop, length, abort, error, timeout.",
    ("adapter", "finish_reason"),
)  # fmt: skip
GOOD_REQUESTS = Metric(
    "loraplex_good_requests_total", "counter",
    "Requests that ended by stop or length, within the objective: goodput.", _ADAPTER,
)  # fmt: skip
PREEMPTIONS = Metric(
    "loraplex_preemptions_total", "counter", "Times that a sequence was preempted.", _ADAPTER
)
REFUSALS = Metric(
    "loraplex_engine_refusals_total", "counter",
    "Requests that were not queued: by the engine, or before it for their tenant's rates.",
    ("adapter", "reason"),
)  # fmt: skip

# Of the engine.
ENGINE_UP = Metric("loraplex_engine_up", "gauge", "1 while the engine answers, else 0.")
ENGINE_START = Metric(
    "loraplex_engine_start_time_seconds", "gauge", "Unix time of the engine's start."
)
SLO_TTFT = Metric(
    "loraplex_slo_time_to_first_token_seconds", "gauge", "The objective of good requests."
)
SLO_PER_TOKEN = Metric(
    "loraplex_slo_time_per_output_token_seconds", "gauge", "The objective of good requests."
)
STEP_PARTS = Metric(
    "loraplex_step_part_seconds_total", "counter",
    "Time of steps by part: schedule, prepare, forward, lora, sample, post. `forward` is without "
    "`lora`, which is measured in one step of 16 and estimated in the others.", ("part",),
)  # fmt: skip
STEP_SECONDS = Metric("loraplex_step_seconds", "histogram", "Time of a step.")
STEP_ROWS = Metric("loraplex_step_rows", "histogram", "Sequences in a step.")
STEP_TOKENS = Metric("loraplex_step_tokens", "histogram", "Tokens that a step computed.")
STEP_ADAPTERS = Metric("loraplex_step_adapters", "histogram", "Different adapters in a step.")
RUNNING = Metric("loraplex_requests_running", "gauge", "Sequences that run.")
WAITING = Metric("loraplex_requests_waiting", "gauge", "Sequences that wait.")
KV_USED = Metric("loraplex_kv_blocks_used", "gauge", "KV blocks in use.")
KV_TOTAL = Metric("loraplex_kv_blocks", "gauge", "KV blocks in all.")
PREFIX_QUERIES = Metric(
    "loraplex_prefix_cache_queries_total", "counter",
    "Prompt tokens of admitted requests, looked up in the prefix cache.",
)  # fmt: skip
PREFIX_HITS = Metric("loraplex_prefix_cache_hits_total", "counter", "Of these, found there.")
SLOTS_USED = Metric("loraplex_slots_used", "gauge", "Adapter slots that are not free.")
SLOTS_TOTAL = Metric("loraplex_slots", "gauge", "Adapter slots in all.")
HOST_ADAPTERS = Metric("loraplex_host_adapters", "gauge", "Adapters in host memory.")
HOST_BYTES = Metric("loraplex_host_adapter_bytes", "gauge", "Their bytes.")

# As vLLM names them, for gateways that route by adapter.
VLLM_LORA = Metric(
    "vllm:lora_requests_info", "gauge",
    "Adapters that run and that wait, and how many fit; the value is the Unix time.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)  # fmt: skip
VLLM_RUNNING = Metric("vllm:num_requests_running", "gauge", "Sequences that run.", ("model_name",))
VLLM_WAITING = Metric("vllm:num_requests_waiting", "gauge", "Sequences that wait.", ("model_name",))
VLLM_KV = Metric("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use, 0 to 1.", ("model_name",))
VLLM_GPU_KV = Metric(
    "vllm:gpu_cache_usage_perc", "gauge", "The same, by its older name.", ("model_name",)
)
VLLM_CACHE = Metric(
    "vllm:cache_config_info", "gauge", "1; sizes of the KV cache.", ("block_size", "num_gpu_blocks")
)

# Of the API process that answers.
HTTP_REQUESTS = Metric(
    "loraplex_http_requests_total", "counter", "Replies, by route and status.",
    ("method", "route", "status"),
)  # fmt: skip
HTTP_REFUSALS = Metric(
    "loraplex_http_refusals_total", "counter",
    "Replies other than success, by the reason code that they carry.", ("reason", "status"),
)  # fmt: skip
DEGRADED = Metric(
    "loraplex_degraded", "gauge", "1 while what API processes share (Redis) is away, else 0."
)
UNWRITTEN_USAGE = Metric(
    "loraplex_usage_rows_pending", "gauge", "Usage rows that the database has not taken yet."
)


def all_metrics() -> list[Metric]:
    """Every metric there is, in the order of the page."""
    return [value for value in globals().values() if isinstance(value, Metric)]


def series_names() -> frozenset[str]:
    """Every name that a query may use."""
    return frozenset(name for metric in all_metrics() for name in metric.series)
