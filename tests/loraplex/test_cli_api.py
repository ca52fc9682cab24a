"""The commands that call a service: every failure is a sentence, and nothing printed is cut."""

import http.server
import io
import json
import re
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from loraplex.cli.options import fits_terminal, print_table, print_wide_table

KEY_ID = "key_0123456789abcdef"
KEY = {
    "id": KEY_ID,
    "hint": "lpx_\u2026abcd",
    "scopes": ["inference", "tenant"],
    "created_at": "2026-11-29T21:18:29.465090Z",
    "expires_at": None,
    "revoked_at": "2026-11-29T21:18:29.465090Z",
    "last_used_at": None,
}
TENANTS = [
    {"name": name, "weight": 1.0, "created_at": "2026-11-29T21:18:29Z", "suspended_at": None}
    for name in ("acme", "zen")
]
USAGE = {
    "period": "2026-01-31T00:00:00Z", "tenant": None, "adapter": None, "version": None,
    "requests": 2, "prompt_tokens": 30, "cached_tokens": 16, "completion_tokens": 12,
    "engine_seconds": 0.5,
}  # fmt: skip
ADAPTER = {
    "name": "legal", "latest_version": 3, "versions": 3, "residency": "auto",
    "aliases": {"default": 1, "beta": 3},
    "canaries": {"default": {"version": 2, "share": 0.125}},
}  # fmt: skip
VERSION = {
    "state": "ready", "digest": "d" * 64, "rank": 8, "bytes": 1000,
    "created_at": "2026-11-29T21:18:29.465090Z",
}  # fmt: skip
REPLIES = {
    "/admin/tenants/acme/keys": json.dumps({"data": [KEY]}),
    "/v1/adapters": "<html>a proxy's page</html>",
    "/v1/adapters?limit=1": json.dumps({"data": []}),
    "/t/acme/v1/adapters": json.dumps({"data": [ADAPTER]}),
    "/t/acme/v1/adapters/legal": json.dumps(ADAPTER),
    "/t/acme/v1/adapters/legal/versions": json.dumps(
        {"data": [{**VERSION, "version": v} for v in (3, 2)], "next": "2"}
    ),
    "/t/acme/v1/adapters/legal/versions?after=2&limit=1000": json.dumps(
        {"data": [{**VERSION, "version": 1}]}
    ),
    "/admin/tenants/acme": json.dumps({**TENANTS[0], "quota": {"max_rank": 8, "max_queued": None}}),
    "/v1/usage?group_by=day": json.dumps({"data": [USAGE]}),
    "/t/acme/v1/usage": json.dumps({"data": []}),
    "/admin/usage?since=2026-01-01T00%3A00%3A00Z&format=csv": "period,tenant\n,acme\n",
    "/admin/tenants": json.dumps({"data": TENANTS[:1], "next": "acme"}),
    "/admin/tenants?after=acme&limit=1000": json.dumps({"data": TENANTS[1:]}),
    f"/admin/tenants/acme/keys/{KEY_ID}/rotate": json.dumps({"key": "lpx_new"}),
}
REFUSALS = {
    "Bearer lpx_revoked": (401, "invalid_api_key"),
    "Bearer lpx_inference": (403, "insufficient_scope"),
    "Bearer lpx_admin": (403, "tenant_required"),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Says what was asked, where it knows no better."""

    def do_GET(self) -> None:
        refused = REFUSALS.get(self.headers["authorization"])
        if refused is not None:
            status, code = refused
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"detail": "no", "code": code}).encode())
            return
        body = REPLIES.get(self.path)
        self.send_response(200 if body else 404)
        self.end_headers()
        self.wfile.write((body or json.dumps({"detail": f"asked for {self.path}"})).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_DELETE(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Generator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run(url: str, *arguments: str, key: str = "lpx_key") -> Result:
    assert isinstance(main, click.Group)
    return CliRunner().invoke(main, [*arguments, "--url", url, "--api-key", key])


def test_a_table_is_never_cut(url: str):
    result = run(url, "keys", "list", "acme")
    assert result.exit_code == 0, result.output
    _, row = result.stdout.splitlines()
    assert row.split()[:4] == [KEY_ID, "lpx_\u2026abcd", "inference", "tenant"]
    assert row.count("2026-11-29 21:18:29Z") == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_fits_a_terminal_if_no_line_of_it_would_be_broken(monkeypatch: pytest.MonkeyPatch):
    columns, rows = ["load", "failed"], [["8 at a time", "0"], ["16/s", "10,000,000"]]
    needed = len("8 at a time") + len("10,000,000") + 2
    assert fits_terminal(columns, [["x" * 10_000, "0"]])  # there is none
    for width, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", Terminal())
        assert fits_terminal(columns, rows) == fits
        print_table(columns, rows)
        assert isinstance(sys.stdout, Terminal)
        assert (len(sys.stdout.getvalue().splitlines()) == 3) == fits


def test_a_table_that_is_too_wide_stands_upright_in_blocks_that_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    columns = ["policy", *(f"figure {number}" for number in range(12))]
    rows = [[f"policy_{name}", *(f"{100 * n:,} ± {n}" for n in range(12))] for name in "abcdefg"]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    print_wide_table(columns, rows)
    blocks = re.sub(r"\x1b\[\d*m", "", screen.getvalue()).split("\n\n")
    assert [block.split("\n")[0].split()[1:] for block in blocks] == [
        ["policy_a", "policy_b", "policy_c", "policy_d"],
        ["policy_e", "policy_f", "policy_g"],
    ]
    assert all([line.split("  ")[0] for line in b.strip().split("\n")] == columns for b in blocks)
    assert max(len(line) for block in blocks for line in block.split("\n")) <= 60


def test_a_list_in_pages_is_shown_whole(url: str):
    result = run(url, "tenants", "list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["tenant", "acme", "zen"]


def test_a_canary_and_its_share_go_together(url: str):
    path = "/v1/adapters/legal/aliases/default"
    asked = run(url, "adapters", "alias", "legal", "1", "--canary", "2", "--share", "0.1")
    assert f"asked for {path}" in asked.stderr
    for arguments in (("--canary", "2"), ("--share", "0.1")):
        refused = run(url, "adapters", "alias", "legal", "1", *arguments)
        assert "--canary and --share go together" in refused.output


def test_tables_show_a_canary_with_its_share(url: str):
    [_, row] = run(url, "adapters", "list", "--tenant", "acme").stdout.splitlines()
    assert row.split() == ["legal", "1+2@12.5%", "3", "beta=3", "auto"]
    shown = run(url, "adapters", "show", "legal", "--tenant", "acme").stdout.splitlines()
    assert [line.split()[:2] for line in shown[1:]] == [
        ["3", "beta"], ["2", "default@12.5%"], ["1", "default"],
    ]  # fmt: skip
    assert all(line.endswith(" 2026-11-29 21:18:29Z") for line in shown[1:])


def test_a_url_may_be_what_clients_of_openai_are_given(url: str):
    for given in (url + "/v1", url + "/v1/", url + "/"):
        result = run(given, "adapters", "list", "--tenant", "acme")
        assert result.exit_code == 0, result.output


def test_a_day_begins_at_midnight_and_what_is_no_time_is_told_its_form(url: str):
    table = run(url, "usage", "--all", "--csv", "--since", "2026-01-01")
    assert table.stdout == "period,tenant\n,acme\n"
    table = run(url, "usage", "--all", "--csv", "--since", "2026-01-01T02:00:00+02:00")
    assert table.stdout == "period,tenant\n,acme\n"
    for wrong in ("yesterday", "2026-13-01", "2026-01-01T00:00:00", "2026-01", ""):
        refused = run(url, "usage", "--since", wrong)
        assert refused.exit_code == 2
        assert "--since" in refused.stderr and "2026-01-31T00:00:00Z" in refused.stderr


def test_without_a_key_the_variable_is_named_and_where_keys_come_from(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    for given in ([], ["--api-key", ""]):
        result = CliRunner().invoke(main, ["adapters", "list", "--url", url, *given])
        assert result.exit_code == 2
        for words in ("LORAPLEX_API_KEY", "admin.key", "loraplex keys create TENANT"):
            assert words in result.stderr


def test_a_refused_key_is_told_what_may_be_wrong_with_it(url: str):
    result = run(url, "keys", "list", "acme", key="lpx_revoked")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    for words in ("LORAPLEX_API_KEY", "unknown, revoked or past its time", "loraplex keys create"):
        assert words in result.stderr
    assert "lpx_revoked" not in result.stderr


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lpx_revoked", "unknown, revoked or past its time"),
        ("lpx_inference", "insufficient_scope"),
        ("lpx_admin", "an admin's key, which belongs to no tenant: name the tenant by --tenant"),
    ],
)
def test_a_key_that_may_not_push_is_refused_before_the_upload(
    url: str, tmp_path: Path, key: str, words: str
):
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.symlink_to("/proc/self/mem")  # reading it would be another error
    result = run(url, "adapters", "push", "x", str(tmp_path), key=key)
    assert (result.exit_code, words in result.stderr) == (1, True)
    assert "cannot be read" not in result.stderr


def test_where_nothing_listens_the_address_is_named_and_how_to_start_a_service():
    result = run("http://127.0.0.1:9", "adapters", "list")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    for words in ("http://127.0.0.1:9", "loraplex serve --model", "LORAPLEX_URL"):
        assert words in result.stderr


@pytest.mark.parametrize("name", ["No Such", "x@1", "", "base"])
def test_a_name_that_no_adapter_may_have_is_refused_before_anything_is_sent(
    tmp_path: Path, name: str
):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    result = run("http://127.0.0.1:9", "adapters", "push", name, str(tmp_path))
    assert result.exit_code == 1
    code = "name_reserved" if name == "base" else "invalid_name"
    assert f"({code})" in result.stderr and "no answer" not in result.stderr


@pytest.mark.parametrize("group", ["adapters", "keys", "tenants"])
def test_what_a_group_says_it_does_its_commands_are_called(group: str):
    assert isinstance(main, click.Group)
    found = main.get_command(click.Context(main), group)
    assert isinstance(found, click.Group) and found.help is not None
    verbs = re.findall(r"\w+(?=,| and )|(?<=and )\w+", found.help.lower())
    assert len(verbs) >= 4 and set(verbs) <= set(found.commands)


def test_groups_say_the_same_of_themselves_and_in_the_root_help():
    root = CliRunner().invoke(main, ["--help"]).output
    for name in ("adapters", "blobs", "db", "keys", "tenants"):
        text = " ".join(CliRunner().invoke(main, [name, "--help"]).output.split())
        [line] = [line.strip() for line in root.splitlines() if line.strip().startswith(name + " ")]
        assert line.removeprefix(name).strip() in text, name


def test_a_rotated_key_alone_is_on_standard_output(url: str):
    result = run(url, "keys", "rotate", "acme", KEY_ID, "--overlap", "60")
    assert (result.exit_code, result.stdout) == (0, "lpx_new\n")
    assert "60 s more" in result.stderr


def test_a_quota_is_shown_and_set(url: str):
    shown = run(url, "tenants", "quota", "show", "acme")
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert rows == [["weight", "1.0"], ["max_rank", "8"], ["max_queued", "-"]]
    told = run(url, "tenants", "quota", "set", "acme", "--max-rank", "8", "--weight", "2")
    assert "asked for /admin/tenants/acme/quota" in told.stderr
    for arguments in (("--max-rank", "0"), ("--weight", "nan"), ("--tokens-per-minute", "many")):
        refused = run(url, "tenants", "quota", "set", "acme", *arguments)
        assert arguments[0] in refused.output, arguments


def test_sources_of_a_tenant_are_asked_for_by_name(url: str):
    for arguments, asked in (
        (("list", "acme"), "/admin/tenants/acme/sources"),
        (("allow", "acme", "hf://org", "--credential", "c"), "/admin/tenants/acme/sources"),
        (("withdraw", "acme", "hf://org"), "/admin/tenants/acme/sources?source=hf%3A%2F%2Forg"),
    ):
        result = run(url, "tenants", "sources", *arguments)
        assert f"asked for {asked}" in result.stderr, arguments
    refused = run(url, "adapters", "register", "a", "hf://org/x", "--sampling", "[1]")
    assert refused.exit_code == 2 and "--sampling" in refused.stderr


def test_usage_is_a_table_of_what_it_is_grouped_by(url: str):
    lines = run(url, "usage", "--group-by", "day").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["period", "requests", "prompt_tokens", "cached_tokens", "completion_tokens",
         "engine_seconds"],
        ["2026-01-31T00:00:00Z", "2", "30", "16", "12", "0.500"],
    ]  # fmt: skip
    assert run(url, "usage", "--tenant", "acme").exit_code == 0
    table = run(url, "usage", "--all", "--csv", "--since", "2026-01-01T00:00:00Z")
    assert table.stdout == "period,tenant\n,acme\n"


def test_what_ends_a_tenant_asks_for_what_it_says(url: str):
    for arguments, asked in (
        (("suspend", "acme"), "/admin/tenants/acme/suspend"),
        (("resume", "acme"), "/admin/tenants/acme/resume"),
        (("rm", "acme", "--yes"), "/admin/tenants/acme?usage=keep"),
        (("rm", "acme", "--yes", "--with-usage"), "/admin/tenants/acme?usage=delete"),
    ):
        result = run(url, "tenants", *arguments)
        assert f"asked for {asked}" in result.stderr, arguments


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("..", "/v1/adapters/%2E%2E/versions"),
        ("../../admin/tenants/x", "/v1/adapters/%2E%2E%2F%2E%2E%2Fadmin%2Ftenants%2Fx/versions"),
        ("a?b#c", "/v1/adapters/a%3Fb%23c/versions"),
        ("100% é", "/v1/adapters/100%25%20%C3%A9/versions"),
        ("v1.2", "/v1/adapters/v1%2E2/versions"),
    ],
)
def test_a_name_stays_one_segment_of_the_path(url: str, name: str, asked: str):
    result = run(url, "adapters", "show", name)
    assert (result.exit_code, result.stderr) == (1, f"Error: asked for {asked} (404)\n")


@pytest.mark.parametrize("wrong", ["nowhere", "http://[::1", "ftp://x", "http://x:99999999", ""])
def test_a_url_that_is_none_is_a_sentence(wrong: str):
    result = run(wrong, "adapters", "list")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("Error: ")


@pytest.mark.parametrize("key", ["clé", "a\nb", "a\rb: c"])
def test_a_key_that_can_be_none_is_a_sentence(url: str, key: str):
    result = run(url, "adapters", "list", key=key)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert key not in result.stderr


def test_an_answer_from_something_else_is_a_sentence(url: str):
    result = run(url, "adapters", "list")
    assert result.exit_code == 1
    assert result.stderr == f"Error: what answers at {url} is not Loraplex; see --url\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tenants", "create", "x", "--weight", "nan"], "--weight"),
        (["tenants", "create", "x", "--weight", "0"], "--weight"),
        (["keys", "create", "x", "--days", "99999999"], "--days"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_option(arguments: list[str], named: str):
    result = run("http://127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_file_that_goes_away_is_a_sentence(url: str, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").symlink_to("/proc/self/mem")  # opens, does not read
    result = run(url, "adapters", "push", "x", str(tmp_path))
    assert result.exit_code == 1
    assert f"Error: {tmp_path} cannot be read" in result.stderr
