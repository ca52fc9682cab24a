"""The demo from beginning to end: weights, service, tenants, uploads, questions, verdict."""

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from loraplex.cli.api_client import ApiClient
from loraplex.demo.ask import Answer, Asker, ask_all
from loraplex.demo.board import Board
from loraplex.demo.service import DemoService, demo_service
from loraplex.demo_examples import DemoAdapter, find_examples, load_adapters, load_questions
from loraplex.progress import RichProgress
from loraplex.weights import WeightsSource, default_cache_dir, ensure_weights

BASE = "smollm2-135m-instruct"
TENANTS = ("acme", "globex")
MIN_HELD = 4
"""Of five questions: each adapter's predicate must hold on at least this many."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the board: who is asked, and what its answers should show."""

    asker: Asker
    adapter: DemoAdapter | None
    """None for the base model, whose answers should show no adapter's effect."""


def run_demo(
    console: Console, *, weights: WeightsSource, examples: Path | None, keep_serving: bool
) -> bool:
    """Run the demo; returns whether every answer came and looked as it should.

    Raises `DemoError`, `WeightsError`, `ExamplesError` or `CallFailed`.
    """
    folder = find_examples(examples)
    adapters, questions = load_adapters(folder), load_questions(folder).demo
    with RichProgress(console) as progress:
        model = ensure_weights(weights, default_cache_dir(), progress)
        progress.start("Starting the service")
        service_context = demo_service(model, BASE, [])
        service = service_context.__enter__()
    try:
        columns = _set_up(console, service, adapters)
        answers = [[Answer(c.asker.model, question) for c in columns] for question in questions]
        max_tokens = max(adapter.max_tokens for adapter in adapters)
        _ask(console, service, columns, answers, max_tokens)
        passed = _verdict(console, columns, answers, adapters)
        _print_next_steps(console, service, columns, questions[0], keep_serving=keep_serving)
        if keep_serving:
            _serve_until_interrupted(console, service)
    finally:
        service_context.__exit__(None, None, None)
    return passed


def _set_up(
    console: Console, service: DemoService, adapters: Sequence[DemoAdapter]
) -> list[Column]:
    """Two tenants with a key each; the first adapter belongs to one, the others to the other."""
    keys: dict[str, str] = {}
    with ApiClient(service.url, service.admin_key) as admin:
        for tenant in TENANTS:
            admin.call("POST", "/admin/tenants", json={"name": tenant})
            body = {"scopes": ["tenant", "inference"]}
            keys[tenant] = admin.call("POST", f"/admin/tenants/{tenant}/keys", json=body)["key"]
    columns = [Column(Asker(BASE, TENANTS[0], keys[TENANTS[0]]), None)]
    progress_columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*progress_columns, console=console) as progress:
        for number, adapter in enumerate(adapters):
            tenant = TENANTS[min(number, len(TENANTS) - 1)]
            with ApiClient(service.url, keys[tenant]) as api:
                api.push_adapter(adapter.name, adapter.folder, progress=progress)
            columns.append(Column(Asker(adapter.name, tenant, keys[tenant]), adapter))
    return columns


def _ask(
    console: Console, service: DemoService, columns: Sequence[Column],
    answers: Sequence[Sequence[Answer]], max_tokens: int,
) -> None:  # fmt: skip
    total = sum(len(row) for row in answers)
    console.print(
        f"\n[bold]{len(answers)} questions to {len(columns)} models[/bold], "
        f"all {total} at once in one engine; ✓ says that an answer has the trained form:\n"
    )
    headings = [
        "base model" if column.adapter is None else f"{column.asker.tenant}/{column.adapter.name}"
        for column in columns
    ]
    with Board(console, headings, answers, [_mark(column) for column in columns]) as board:
        askers = [column.asker for column in columns]
        asyncio.run(
            ask_all(service.url, askers, answers, max_tokens=max_tokens, on_change=board.changed)
        )


def _mark(column: Column) -> Callable[[str], Text]:
    adapter = column.adapter
    if adapter is None:
        return lambda _: Text("no adapter", style="dim")
    return lambda text: (
        Text("✓ as trained", style="green")
        if adapter.holds(text)
        else Text("✗ not as trained", "red")
    )


def _verdict(
    console: Console, columns: Sequence[Column], answers: Sequence[Sequence[Answer]],
    adapters: Sequence[DemoAdapter],
) -> bool:  # fmt: skip
    table = Table(title="Summary", title_justify="left", title_style="bold")
    for heading in (
        "model",
        "tenant",
        "answers",
        "tok/s each",
        "first token",
        "queued",
        "as trained",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "tenant") else "right")
    passed = True
    for number, column in enumerate(columns):
        own = [row[number] for row in answers]
        came = [a for a in own if a.error is None and a.text]
        if column.adapter is None:
            others = max(sum(a.holds(answer.text) for answer in came) for a in adapters)
            good = len(came) == len(own) and others < MIN_HELD
            shown = f"{others} of {len(own)} (none expected)"
        else:
            held = sum(column.adapter.holds(answer.text) for answer in came)
            good = len(came) == len(own) and held >= MIN_HELD
            shown = f"{held} of {len(own)}"
        passed &= good
        table.add_row(
            column.asker.model, column.asker.tenant, f"{len(came)} of {len(own)}",
            _middle([a.tokens_per_second for a in came], "{:.1f}"),
            _middle([a.ttft_seconds for a in came], "{:.2f} s"),
            _middle([a.queue_ms for a in came], "{:.0f} ms"),
            Text(f"{'✓' if good else '✗'} {shown}", style="green" if good else "red"),
        )  # fmt: skip
    console.print(table)
    return passed


def _middle(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(median(known)) if known else "-"


def _print_next_steps(
    console: Console, service: DemoService, columns: Sequence[Column], question: str, *,
    keep_serving: bool,
) -> None:  # fmt: skip
    if not keep_serving:
        return
    console.print("\n[bold]The service keeps running. Try it:[/bold]\n")
    lines = [
        f"API page      {service.url}/docs",
        f"Health        {service.url}/health/ready",
        f"OpenAI API    {service.url}/v1   (a tenant's key says whose adapters)",
        "",
    ]
    for column in columns[1:]:
        messages = [{"role": "user", "content": question}]
        body = json.dumps({"model": column.asker.model, "messages": messages, "temperature": 0})
        lines += [
            f"curl {service.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"  -H 'Authorization: Bearer {column.asker.key}' -d {shlex.quote(body)}",
            "",
        ]
    lines += [
        "List a tenant's models:",
        f"curl {service.url}/v1/models -H 'Authorization: Bearer {columns[1].asker.key}'",
        "",
        "Or with the command line (the admin's key; try --help):",
        f"export LORAPLEX_URL={service.url} LORAPLEX_API_KEY={service.admin_key}",
        f"{shlex.quote(sys.argv[0])} tenants list",
    ]
    for line in lines:  # one by one and unwrapped, so that they can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _serve_until_interrupted(console: Console, service: DemoService) -> None:
    console.print("\nPress Ctrl-C to stop.", style="dim")
    try:
        service.process.wait()
        console.print("The service ended by itself.", style="red")
    except KeyboardInterrupt:
        console.print("\nStopping ...", style="dim")
