"""`loraplex bench`, as one types it."""

import json

import pytest
from click.testing import CliRunner

from loraplex.cli import main
from tests.support.sse_server import sse_server, tokens

SMALL = ["--prompts", "fixed:4", "--outputs", "fixed:3", "--requests", "6", "--warm-up", "0"]


def _bench(*arguments):
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_sweep_writes_rows_calls_and_a_report_that_loads_nothing(tmp_path):
    rows, calls, page = (tmp_path / name for name in ("rows.json", "calls.jsonl", "page.html"))
    told = {"queue": {"load": 2.0, "slot": 1.0}, "load_ms": 2.0}
    with sse_server(lambda body: tokens(body, loraplex=told)) as server:
        result = _bench("--url", server.url, "--rate", 200, "--rate", 400, "--concurrency", 2,
                        "--adapter", "<polite>", "--adapter", "rude", "--popularity", "uniform",
                        *SMALL, "--json", rows, "--jsonl", calls, "--html", page)  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(rows.read_text())
    assert [(r["loop"], r["rate"], r["concurrency"]) for r in document["rows"]] == [
        ("open", 200, None), ("open", 400, None), ("closed", None, 2),
    ]  # fmt: skip
    assert all(r["num_requests"] == 6 and r["goodput"] == 1 for r in document["rows"])
    assert document["saturation"] == max(r["output_tokens_per_second"] for r in document["rows"])
    assert document["rows"][0]["models"][0]["queue_ms"] == told["queue"]
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    assert len(lines) == 18 and {line["output_tokens"] for line in lines} == {3}
    text = page.read_text()
    assert text.count("<svg") == 5 and "&lt;polite&gt;" in text and "<polite>" not in text
    assert "fixed:4" in text and "poisson" in text
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert {body["model"] for _, _, body in server.requests} == {"<polite>", "rude"}


def test_a_trace_is_replayed_at_its_own_times_or_at_a_rate(tmp_path):
    trace, calls = tmp_path / "trace.jsonl", tmp_path / "calls.jsonl"
    trace.write_text(
        '{"at": 0.0, "prompt_tokens": 5, "output_tokens": 6, "adapter": "x"}\n'
        '{"at": 0.1, "prompt_tokens": 5, "output_tokens": 2}\n'
    )
    with sse_server() as server:
        result = _bench("--url", server.url, "--trace", trace, "--jsonl", calls, "--rate", 200)
        again = _bench("--url", server.url, "--trace", trace)
    assert (result.exit_code, again.exit_code) == (0, 0) and "trace" in again.output
    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    dues = {line["model"]: line["due"] for line in lines}
    assert dues == pytest.approx({"x": 0.0, "the-base": 0.01})
    # Which of two calls 10 ms apart arrives first is the network's.
    for run in (server.requests[:2], server.requests[2:]):
        assert sorted(body["model"] for _, _, body in run) == ["the-base", "x"]


def test_errors_are_named_and_a_test_of_which_nothing_was_served_fails():
    with sse_server(lambda body: 429) as server:
        result = _bench("--url", server.url, "--concurrency", 1, *SMALL)
    assert result.exit_code == 1 and "429 queue_full" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "names no model"),
        (["--tenant-key", "acme"], "must be TENANT=KEY"),
        (["--rate", "0"], "x>0"),
        (["--jsonl", "/nowhere/calls.jsonl"], "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(arguments, message):
    result = _bench(*arguments)
    assert result.exit_code != 0 and message in result.output
