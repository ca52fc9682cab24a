"""What the dashboard's pages about adapters read; `views.py` says what holds for all of them."""

from typing import Literal

from msgspec import Struct

from loraplex.dashboard.views import (
    CauseColumns,
    Causes,
    FinishColumns,
    Finishes,
    PercentileColumns,
    Percentiles,
    Window,
)

State = Literal["queued", "loaded", "prefill", "decode", "preempted", "done"]


class AdapterRow(Struct, frozen=True):
    """One adapter over a window, or a tenant's use of the base (`is_base`, adapter `base`).

    `load` is how long its weights took into a slot, `token_time` a request's mean after its first
    token, `token_gap` its longest gap between two. `resident_share` is the share of the window
    that it held a slot, `residency` where its weights are now, `kept` where it was said that they
    stay (`auto`: they come and go with use). `spark_*` are its requests and its
    p95 of queue seconds in up to 30 equal parts of the window.
    """

    tenant: str
    adapter: str
    is_base: bool
    requests: int
    running: int
    waiting: int
    waits_for: str | None
    queue: Percentiles
    causes: Causes
    load: Percentiles
    loads: int
    ttft: Percentiles
    token_time: Percentiles
    token_gap: Percentiles
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finishes: Finishes
    preemptions: int
    residency: Literal["slot", "loading", "host", "absent", "base"]
    resident_share: float | None
    last_request: float | None
    spark_requests: list[int]
    spark_queue: list[float | None]
    kept: Literal["auto", "warm", "pinned"] = "auto"


AdapterSort = Literal[
    "adapter",
    "requests",
    "queue_p50",
    "queue_p95",
    "queue_p99",
    "queue_seconds",
    "load_p95",
    "ttft_p95",
    "token_time_p95",
    "token_gap_p95",
    "output_tokens",
    "length_share",
    "resident_share",
    "waiting",
    "last_request",
]


class Adapters(Struct, frozen=True):
    """`GET /dashboard/api/adapters?range=&sort=&order=&search=&offset=&limit=`.

    `search` matches any part of `tenant/adapter`, whatever the case; `order` is `asc` or `desc`;
    rows without the figure come last either way. `limit` is at most 200. `total` counts the rows
    that `search` leaves, `known` all that the session may see.
    """

    window: Window
    rows: list[AdapterRow]
    total: int
    known: int
    offset: int


class AliasRow(Struct, frozen=True):
    """Where an alias points: `version`, and to `canary_version` a share of calls."""

    alias: str
    version: int
    canary_version: int | None
    canary_share: float


class VersionRow(Struct, frozen=True):
    """One version of an adapter over a window. `share` is its part of the adapter's requests."""

    version: int
    published: float
    state: str
    rank: int | None
    bytes: int | None
    requests: int
    share: float | None
    output_tokens: int
    queue: Percentiles
    ttft: Percentiles
    finishes: Finishes


class Publish(Struct, frozen=True):
    """A version that began to answer, and how replies ended before and after it.

    `before` are the endings of the version that answered until then, `after` the new one's, both
    as far as they are kept, without requests that had to run until their limit because they asked
    for it (`ignore_eos`). `verdict` is `never_stops` when the new version runs to its limit far
    more often than chance and the old one allow (a fine-tune that forgot its end token), and
    `too_few` until there are enough endings to tell.
    """

    at: float
    version: int
    previous: int | None
    before: Finishes
    after: Finishes
    before_length_share: float | None
    after_length_share: float | None
    verdict: Literal["fine", "never_stops", "too_few"]


class Moment(Struct, frozen=True, array_like=True):
    """A step of a request's timeline: seconds after its arrival, and the state it entered.

    `prefill` appears once a chunk. In JSON: `[0.25, "prefill"]`.
    """

    offset: float
    state: State


class RequestView(Struct, frozen=True):
    """One request: where its time went."""

    request_id: str
    tenant: str
    adapter: str
    version: int | None
    arrived: float
    queue_seconds: float
    causes: Causes
    load_seconds: float | None
    ttft_seconds: float | None
    end_to_end_seconds: float
    decode_seconds: float | None
    longest_gap_seconds: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    preemptions: int
    timeline: list[Moment]


class AdapterView(Struct, frozen=True):
    """`GET /dashboard/api/adapters/{tenant}/{adapter}?range=`; 404 where there is none to see.

    `row` sums the window up; its `causes` are the sums of `causes` here. `slow_requests` are up to
    20 of the window, those first that took longest until their first token and between two tokens.
    """

    window: Window
    row: AdapterRow
    requests: list[int | None]
    causes: CauseColumns
    queue: PercentileColumns
    ttft: PercentileColumns
    token_gap: PercentileColumns
    output_tokens: list[int | None]
    finishes: FinishColumns
    versions: list[VersionRow]
    version_requests: dict[str, list[int | None]]
    aliases: list[AliasRow]
    publishes: list[Publish]
    slow_requests: list[RequestView]
