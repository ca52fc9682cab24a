"""The demo from beginning to end: weights, service, tenants, uploads, questions, verdict."""

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loraplex.cli.api_client import ApiClient
from loraplex.demo.ask import Answer, Asker, ask_all
from loraplex.demo.board import Board, Column
from loraplex.demo.service import DemoService, demo_service
from loraplex.demo.summary import print_summary
from loraplex.demo_examples import DemoAdapter, find_examples, load_adapters, load_questions
from loraplex.progress import StageBars
from loraplex.weights import WeightsSource, default_cache_dir, ensure_weights

BASE = "smollm2-135m-instruct"
TENANTS = ("acme", "globex")


def run_demo(
    console: Console, *, weights: WeightsSource, examples: Path | None, keep_serving: bool
) -> bool:
    """Run the demo; returns whether every answer came and looked as it should.

    Raises `DemoError`, `WeightsError`, `ExamplesError` or `CallFailed`.
    """
    folder = find_examples(examples)
    adapters, questions = load_adapters(folder), load_questions(folder).demo
    with contextlib.ExitStack() as stack:
        with StageBars(console) as progress:
            model = ensure_weights(weights, default_cache_dir(), progress)
            progress.start("Starting the service")
            service = stack.enter_context(demo_service(model, BASE, []))
        columns = _set_up(console, service, adapters)
        answers = [[Answer(c.asker.model, question) for c in columns] for question in questions]
        max_tokens = max(adapter.max_tokens for adapter in adapters)
        _ask(console, service, columns, answers, max_tokens)
        passed = print_summary(console, columns, answers)
        if keep_serving:
            _print_what_to_try(console, service, columns, questions[0])
            _serve_until_interrupted(console, service)
        elif passed:
            _print_next_steps(console, model, adapters[0])
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
    with Board(console, columns, answers) as board:
        askers = [column.asker for column in columns]
        asyncio.run(
            ask_all(service.url, askers, answers, max_tokens=max_tokens, on_change=board.changed)
        )


def _print_next_steps(console: Console, model: Path, adapter: DemoAdapter) -> None:
    """For one who has seen the answers and is back at the shell."""
    command = shlex.quote(sys.argv[0])
    console.print("\n[bold]Next, serve it yourself:[/bold]\n")
    _print_lines(
        console,
        f"{command} serve --model {shlex.quote(str(model))} --data-dir ./data",
        "",
        "It says where its admin key is. In another terminal:",
        "export LORAPLEX_API_KEY=...            # the admin key",
        f"{command} tenants create acme",
        f"{command} keys create acme --scope tenant --scope inference",
        "export LORAPLEX_API_KEY=...            # the key just printed",
        f"{command} adapters push {adapter.name} {shlex.quote(str(adapter.folder))}",
        f"{command} adapters list",
        "",
        "These are the first lines of README.md's tour, which goes on with calls. Without --once "
        "(make demo) the demo keeps serving.",
    )


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:  # one by one and unwrapped, so that they can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_what_to_try(
    console: Console, service: DemoService, columns: Sequence[Column], question: str
) -> None:
    console.print("\n[bold]The service keeps running. Try it:[/bold]\n")
    lines = [
        f"Dashboard     {service.url}/dashboard   (log in with the admin's key, below)",
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
    _print_lines(console, *lines)


def _serve_until_interrupted(console: Console, service: DemoService) -> None:
    console.print("\nPress Ctrl-C to stop.", style="dim")
    try:
        service.process.wait()
        console.print("The service ended by itself.", style="red")
    except KeyboardInterrupt:
        console.print("\nStopping ...", style="dim")
