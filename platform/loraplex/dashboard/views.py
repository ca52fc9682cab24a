"""What the dashboard's pages read: every JSON answer and every event of `/dashboard/api/…`.

The pages in `static/` and the routes beside this file meet here, in `adapter_views.py` (the table
of adapters and the page of one) and in `engine_views.py` (slots and batches), nowhere else. Times
are unix seconds, durations are seconds, shares are 0 to 1, and a figure that nothing was measured
for is None. Series are columns: entry i of each belongs to the bucket that begins at
`window.times[i]`, and is None where nobody watched the engine: a gap is not a zero. No struct has a
place for a prompt, a reply, a key or a header.

Every route takes the session's cookie; without one the answer is 401, which sends the page to its
login. Routes with `range` take `5m`, `1h` or `24h`. A tenant's session sees its own adapters:
totals are its own, `engine` is None, and what another tenant holds has neither tenant nor adapter.

`GET /dashboard/api/export/{table}.csv`, with the `range` and, for one adapter, `tenant` and
`adapter` of its page, gives what a chart or table shows as CSV; `Export` lists the tables.
"""

from typing import Literal

from msgspec import Struct

from loraplex.recorder.widths import Range

Export = Literal[
    "throughput",  # overview: tokens, requests and goodput by bucket
    "latency",  # overview: time to first token and token gap by bucket
    "load",  # overview: running, waiting, KV blocks and slots by bucket
    "causes",  # overview: queue seconds by cause and bucket
    "adapters",  # the table, all rows that `search` leaves, sorted as `sort` and `order` say
    "adapter-causes",
    "adapter-latency",
    "adapter-finishes",
    "adapter-traffic",
    "adapter-versions",
    "adapter-publishes",
    "adapter-requests",
    "slots",
    "waits",
    "steps",
    "step-times",
    "alerts",
]


class Window(Struct, frozen=True):
    """The time that an answer is about, in buckets of equal length.

    `times` are the buckets' beginnings. `complete_until` is how far the recorder has written: what
    comes later is missing, and a page says so when it lies more than a few buckets back.
    """

    range: Range
    start: float
    end: float
    step_seconds: float
    times: list[float]
    complete_until: float


class Causes(Struct, frozen=True):
    """Queue seconds by cause; their sum is the queue time."""

    quota: float = 0.0
    load: float = 0.0
    slot: float = 0.0
    kv: float = 0.0
    budget: float = 0.0
    turn: float = 0.0


class CauseColumns(Struct, frozen=True):
    """Queue seconds by cause of the requests that ended in each bucket, summed over them."""

    quota: list[float | None]
    load: list[float | None]
    slot: list[float | None]
    kv: list[float | None]
    budget: list[float | None]
    turn: list[float | None]


class Percentiles(Struct, frozen=True):
    """Of one distribution, in seconds."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class PercentileColumns(Struct, frozen=True):
    """Of one distribution by bucket, in seconds; None where nothing was measured."""

    p50: list[float | None]
    p95: list[float | None]
    p99: list[float | None]


class Finishes(Struct, frozen=True):
    """Requests by how they ended."""

    stop: int = 0
    length: int = 0
    abort: int = 0
    error: int = 0
    timeout: int = 0


class FinishColumns(Struct, frozen=True):
    """Requests that ended in each bucket, by how."""

    stop: list[int | None]
    length: list[int | None]
    abort: list[int | None]
    error: list[int | None]
    timeout: list[int | None]


class Login(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /dashboard/api/session`: sets the cookie, answers with `Session`."""

    key: str


class Session(Struct, frozen=True):
    """`GET /dashboard/api/session`, and the answer to a login. `DELETE` of it logs out (204).

    `tenant` is None for an admin. `slo_*` are the targets that goodput is counted by; `base_model`
    is the name that the base is served under, and `version` the service's own.
    """

    tenant: str | None
    is_admin: bool
    expires: float
    base_model: str
    version: str
    slo_ttft_seconds: float
    slo_token_seconds: float


class EngineNow(Struct, frozen=True):
    """The engine at this moment; for admins. `generation` changes when it restarts."""

    generation: str
    running: int
    max_running: int
    kv_blocks_used: int
    kv_blocks_total: int
    slots_used: int
    slots_total: int
    prefix_hit_share: float | None
    step_seconds: Percentiles


class Live(Struct, frozen=True):
    """Event `live`, every second: what the last ten seconds were like, and what waits now.

    `at` is when the engine was last heard; `engine_up` is False while it is gone. Rates are a
    second. `goodput_share` is the share of the requests that ended and met both targets.
    `token_time` is a request's mean time per token, which its target is about; `token_gap` the
    longest time between two of its tokens, which has no target. A tenant's `running` and `waiting`
    are its own sequences. `missed_records` counts what the recorder was too late to read since the
    service started.
    """

    at: float
    engine_up: bool
    running: int
    waiting: int
    waiting_by_cause: dict[str, int]
    requests_rate: float
    prompt_tokens_rate: float
    output_tokens_rate: float
    goodput_rate: float
    goodput_share: float | None
    ttft: Percentiles
    token_gap: Percentiles
    engine: EngineNow | None
    missed_records: int = 0
    token_time: Percentiles = Percentiles()


class Totals(Struct, frozen=True):
    """Sums over a window."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    good_requests: int
    preemptions: int
    refusals: dict[str, int]
    causes: Causes
    queue: Percentiles
    ttft: Percentiles
    token_gap: Percentiles
    end_to_end: Percentiles
    finishes: Finishes
    token_time: Percentiles = Percentiles()


class Overview(Struct, frozen=True):
    """`GET /dashboard/api/overview?range=`. Rates are a second; gauges are a bucket's mean.

    `running` and `waiting` are a tenant's own sequences; `kv_share` and `slots_used`, the engine's
    state, are empty for a tenant.
    """

    window: Window
    live: Live | None
    totals: Totals
    requests_rate: list[float | None]
    goodput_rate: list[float | None]
    prompt_tokens_rate: list[float | None]
    output_tokens_rate: list[float | None]
    running: list[float | None]
    waiting: list[float | None]
    kv_share: list[float | None]
    slots_used: list[float | None]
    causes: CauseColumns
    ttft: PercentileColumns
    token_gap: PercentileColumns
    token_time: PercentileColumns


class QuotaUse(Struct, frozen=True):
    """One limit of a tenant, and how much of it is used; None: no limit, or nothing that is used.

    The rates are those of the last 60 s; `max_concurrent`, `max_queued` and `max_slots` those of
    this moment, None while the engine is away. A slot counts that is reserved, or whose adapter
    runs: not that of an idle one.
    """

    name: Literal[
        "requests_per_minute",
        "tokens_per_minute",
        "max_concurrent",
        "max_queued",
        "max_slots",
        "max_adapters",
        "max_adapter_bytes",
        "max_rank",
    ]
    limit: int | None
    used: int | None


class Quota(Struct, frozen=True):
    """`GET /dashboard/api/quota`: what the session's tenant may use and uses; 404 for an admin."""

    tenant: str
    weight: float
    is_suspended: bool
    uses: list[QuotaUse]


class Figure(Struct, frozen=True):
    """A number that an alert rests on; `limit` is where it begins to be one."""

    name: str
    value: float
    unit: Literal["s", "share", "per_second", "count", "tokens", "ratio"]
    limit: float | None = None


class Alert(Struct, frozen=True):
    """What goes wrong, since when, its numbers, and what to change.

    `ended` is None while it lasts. `what` and `change` are whole sentences. `tenant` and `adapter`
    name whom it is about; None is the whole service.
    """

    kind: Literal[
        "preemption_thrash",
        "decode_stall",
        "queueing_collapse",
        "runaway_generation",
        "adapter_churn",
        "never_stops",
        "engine_down",
        "records_missed",
    ]
    severity: Literal["warning", "critical"]
    tenant: str | None
    adapter: str | None
    version: int | None
    since: float
    ended: float | None
    what: str
    change: str
    figures: list[Figure]


class Alerts(Struct, frozen=True):
    """`GET /dashboard/api/alerts?range=`, and event `alerts` (those that last, on every change)."""

    alerts: list[Alert]


class Ended(Struct, frozen=True):
    """Event `ended`, the last of a stream: the session is over, and why.

    `GET /dashboard/api/events?topics=` is the stream: `live`, `alerts` and `ended` always, `slots`
    and `steps` when `topics` names them (`topics=slots,steps`).
    """

    reason: Literal["logged_out", "expired", "revoked", "stopping"]
