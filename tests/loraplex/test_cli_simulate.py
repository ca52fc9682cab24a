"""`loraplex simulate`, as one types it."""

import json

import pytest
from click.testing import CliRunner

from engine.simulation.published import compare, jobs
from engine.simulation.study import run_jobs
from loraplex.cli import main
from loraplex.reports.of_simulation import plain_range, rounded

SMALL = ["--requests", "30", "--prompts", "fixed:60", "--outputs", "lognormal:20:0.5:2:40",
         "--processes", "1"]  # fmt: skip

TOO_MUCH = ["--prompts", "fixed:512", "--outputs", "fixed:64", "--policy", "chunked_512",
            "--processes", "1"]  # fmt: skip


def _simulate(*arguments):
    result = CliRunner().invoke(main, ["simulate", *map(str, arguments)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def test_every_policy_and_rate_is_a_line_and_every_run_a_row(tmp_path):
    file = tmp_path / "rows.json"
    result = _simulate(*SMALL, "--rate", 2, "--rate", 400, "--seeds", 2, "--json", file)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(
        "Simulating 16 runs: static_16, static_64, prefill_first, chunked_512 at 2, 400 requests/s"
    )
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 4 * 2 * 2
    assert set(document["saturation"]) == {"static_16", "static_64", "prefill_first", "chunked_512"}
    for policy, saturation in document["saturation"].items():
        means = [
            sum(row["output_tokens_per_second"] for row in document["rows"]
                if (row["policy"], row["rate"]) == (policy, rate)) / 2
            for rate in (2, 400)
        ]  # fmt: skip
        assert saturation == pytest.approx(max(means)) and means[1] > means[0]
        assert policy in result.output
    assert set(document["rows"][0]) >= {
        "policy", "max_num_seqs", "rate", "seed", "output_tokens_per_second", "ttft_p50_ms",
        "tpot_p50_ms", "gap_p99_ms", "goodput",
    }  # fmt: skip


def test_a_table_has_plain_numbers_and_no_deviation_where_there_is_none():
    rounded_numbers = [(12436.7, 4), (100.2, 2), (0.00312, 2), (0.99996, 4), (0, 3), (1e6, 6)]
    assert [rounded(value, digits) for value, digits in rounded_numbers] == [
        "12,440", "100", "0.0031", "1", "0", "1,000,000",
    ]  # fmt: skip
    assert (plain_range(1200, 1300.5), plain_range(0.5, 0.5)) == ("1,200 to 1,300.5", "0.5")
    output = _simulate(*SMALL, "--policy", "chunked_512", "--rate", 400, "--seeds", 3).stdout
    [row] = [line for line in output.splitlines() if line.startswith("chunked_512")]
    assert " ± " in row
    assert all(
        any(digit in "123456789" for digit in part.split()[0]) for part in row.split("±")[1:]
    )


def test_an_slo_that_nothing_meets_leaves_no_goodput(tmp_path):
    file = tmp_path / "rows.json"
    for ttft, goodput in ((0, 0.0), (60_000, 1.0)):
        _simulate(*SMALL, "--policy", "chunked_512", "--rate", 2, "--slo-ttft-ms", ttft,
                  "--seeds", 1, "--json", file)  # fmt: skip
        assert [row["goodput"] for row in json.loads(file.read_text())["rows"]] == [goodput]


def test_adapters_a_trace_and_a_model_folder_can_be_given(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300,
        "num_attention_heads": 4, "tie_word_embeddings": True,
    }))  # fmt: skip
    trace, lengths = tmp_path / "trace.jsonl", tmp_path / "lengths.txt"
    trace.write_text('{"at": 0.5, "prompt_tokens": 5, "output_tokens": 6, "adapter": "x"}\n' * 3)
    lengths.write_text("5\n6\n")
    file = tmp_path / "rows.json"
    result = _simulate("--trace", trace, "--model", tmp_path, "--gpu", "L40S", "--kv-blocks", 900,
                       "--policy", "chunked_512", "--processes", 1, "--json", file)  # fmt: skip
    assert result.exit_code == 0 and "trace" in result.output
    [row] = json.loads(file.read_text())["rows"]
    assert (row["num_requests"], row["num_loads"], row["ttft_p50_ms"] > 30) == (3, 1, True)
    result = _simulate(*SMALL, "--prompts", f"@{lengths}", "--adapters", 5, "--tenants", 2,
                       "--popularity", "hot:0.9", "--arrivals", "gamma:3", "--max-loras", 2,
                       "--policy", "chunked_512", "--json", file)  # fmt: skip
    assert result.exit_code == 0
    assert all(row["num_loads"] > 1 for row in json.loads(file.read_text())["rows"])


def test_what_goes_wrong_is_said_in_text_rows_and_report_with_what_to_change(tmp_path):
    file, page = tmp_path / "rows.json", tmp_path / "page.html"
    files = ["--json", file, "--html", page]
    result = _simulate(*TOO_MUCH, "--requests", 1000, "--rate", 100, "--seeds", 2, *files)
    assert result.exit_code == 0, result.output
    assert "queueing_collapse (critical, in 2 of 2 runs)" in result.output
    assert "add another replica" in result.output and "add another replica" in page.read_text()
    for row in json.loads(file.read_text())["rows"]:
        assert [found["kind"] for found in row["findings"]] == ["queueing_collapse"]
    result = _simulate(*SMALL, "--policy", "chunked_512", "--rate", 1, "--html", page)
    assert "No alert of the service would sound." in result.output
    assert "No alert of the service would sound." in page.read_text()


def test_replies_that_clients_cut_are_no_ends_of_their_own(tmp_path):
    page = tmp_path / "page.html"
    arguments = ["--adapters", 2, "--requests", 60, "--rate", 4, "--prompts", "fixed:60",
                 "--outputs", "fixed:300", "--policy", "chunked_512", "--seeds", 1,
                 "--processes", 1]  # fmt: skip
    assert "runaway_generation" not in _simulate(*arguments).output
    assert (
        "runaway_generation (warning, adapters a"
        in _simulate(*arguments, "--max-tokens", 50, "--html", page).output
    )
    text = page.read_text()
    assert "fixed:300, at most 50 tokens" in text and "rank 16; 30 ms to host memory" in text


def test_the_failure_modes_are_made_named_and_cured(tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "rows.json"
    files = ("--html", page, "--json", file)
    result = _simulate("--preset", "failures", "--processes", 2, *files)
    assert result.exit_code == 0, result.output
    assert result.output.count("sounds") == 5 and "STILL" not in result.output
    text = page.read_text()
    assert "The failure modes, each by its alert" in text and "<svg" not in text
    told = json.loads(file.read_text())["failures"]
    assert len(told) == 5
    assert all(one["is_named"] and one["is_silent_when_cured"] for one in told)


def test_fleets_say_on_how_many_replicas_it_goes_wrong():
    result = _simulate(*TOO_MUCH, "--requests", 2000, "--rate", 200, "--seeds", 1, "--replicas", 2)
    assert "queueing_collapse (critical, in 2 of 2 replicas)" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "fixed:0"], "a length must be at least 1"),
        (["--prompts", "fixed"], "not fixed:N"),
        (["--outputs", "@/nowhere"], "No such file"),
        (["--arrivals", "gamma:-1"], "not poisson"),
        (["--popularity", "hot:2"], "share must be 0 to 1"),
        (["--model", "/nowhere"], "config.json cannot be read"),
        (["--rate", "0"], "x>0"),
        (["--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
        (["--html", "/"], "it is a folder"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(arguments, message):
    result = _simulate(*SMALL, *arguments)
    assert result.exit_code != 0 and message in result.output


def test_a_bad_trace_names_its_line(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    result = _simulate("--trace", trace)
    assert result.exit_code == 1 and "trace.jsonl:1:" in result.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_published_figures_come_out_as_means_of_forty_seeds():
    rows = list(run_jobs(jobs(40), num_processes=2))
    off = [comparison for comparison in compare(rows) if not comparison.holds]
    assert not off

    def mean(policy, rate, field):
        values = [getattr(r.figures, field) for r in rows if (r.policy, r.rate) == (policy, rate)]
        return sum(values) / len(values)

    for rate in (16.0, 20.0):
        gaps = {p: mean(p, rate, "gap_p99_ms") for p in ("chunked_512", "prefill_first")}
        assert gaps["chunked_512"] <= gaps["prefill_first"] / 8
        tokens = {
            p: mean(p, rate, "output_tokens_per_second") for p in ("chunked_512", "prefill_first")
        }
        assert tokens["chunked_512"] >= tokens["prefill_first"]
