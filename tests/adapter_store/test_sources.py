"""References to repositories of a hub."""

import asyncio
import datetime
import os
import ssl
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from adapter_store.references.policy import Grant, HubCredential, SourcePolicy
from adapter_store.references.sources import AdapterSources
from tests.support.fake_hub import COMMIT, FakeHub, FakeResolver, Reply, fake_hub
from tests.support.source_calls import CONFIG, WEIGHTS, fetch, refused

pytestmark = pytest.mark.anyio
LOCAL = {"hub.test": ["127.0.0.1"], "cdn.test": ["127.0.0.1"]}
CONFIG_PATH = "/org/name/resolve/main/adapter_config.json"
WEIGHTS_PATH = f"/org/name/resolve/{COMMIT}/adapter_model.safetensors"


@pytest.fixture
async def hub() -> AsyncGenerator[FakeHub]:
    async with fake_hub() as hub:
        hub.publish("org/name", CONFIG, WEIGHTS)
        yield hub


def policy_for(hub: FakeHub, **changes: Any) -> SourcePolicy:
    document: dict[str, Any] = {
        "hub_url": hub.origin(),
        "private_hosts": ("hub.test", "cdn.test"),
        "hub_redirect_hosts": ("hub.test", "cdn.test"),
    }
    return SourcePolicy(**document | changes)


async def test_the_two_files_of_one_commit_are_fetched_anonymously(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "ambient")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (tmp_path / ".netrc").write_text("machine hub.test login me password ambient")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    seen: list[tuple[int, int | None]] = []
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    fetched = await fetch(sources, "hf://org/name", tmp_path / "in", seen=seen)
    assert fetched.config == CONFIG
    assert fetched.weights.read_bytes() == WEIGHTS
    assert str(fetched.reference) == f"hf://org/name@{COMMIT}"
    assert hub.paths == [CONFIG_PATH, WEIGHTS_PATH]
    for request in hub.requests:
        assert "authorization" not in request.headers
        assert request.headers["host"] == f"hub.test:{hub.port}"
    total = len(CONFIG) + len(WEIGHTS)
    assert seen[-1] == (total, total)
    assert [received for received, _ in seen] == sorted(received for received, _ in seen)
    assert sorted(os.listdir(tmp_path / "in")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


async def test_a_revision_is_one_path_segment(hub: FakeHub, tmp_path: Path):
    hub.publish("org/name", CONFIG, WEIGHTS, "refs%2Fpr%2F1")
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    await fetch(sources, "hf://org/name@refs/pr/1", tmp_path / "in")


async def test_redirects_are_followed_to_listed_hosts(hub: FakeHub, tmp_path: Path):
    hub.replies["/files/w"] = Reply(WEIGHTS)
    hub.replies[WEIGHTS_PATH] = Reply(
        status=302, headers={"location": f"{hub.origin('cdn.test')}/files/w"}
    )
    hub.replies["/moved"] = hub.replies[CONFIG_PATH]
    hub.replies[CONFIG_PATH] = Reply(
        status=307, headers={"location": "/moved", "x-repo-commit": COMMIT}
    )
    resolver = FakeResolver(LOCAL)
    fetched = await fetch(
        AdapterSources(policy_for(hub), resolve=resolver), "hf://org/name", tmp_path / "in"
    )
    assert fetched.weights.read_bytes() == WEIGHTS
    assert resolver.asked == ["hub.test", "hub.test", "hub.test", "cdn.test"]


@pytest.mark.parametrize(
    "location",
    [
        "http://other.test:{port}/x",  # not listed
        "https://hub.test.evil.com/x",
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.1:{port}/x",
        "http://user:pw@hub.test:{port}/x",
        "file:///etc/passwd",
        "ftp://cdn.test/x",
        "http://public.test:{port}/x",  # listed, but only private hosts speak http
        "https://public.test:8443/x",
    ],
)
async def test_redirects_lead_nowhere_else(hub: FakeHub, tmp_path: Path, location: str):
    hub.replies[WEIGHTS_PATH] = Reply(
        status=302, headers={"location": location.format(port=hub.port)}
    )
    policy = policy_for(hub, hub_redirect_hosts=("hub.test", "cdn.test", "public.test"))
    resolver = FakeResolver(LOCAL | {"other.test": ["127.0.0.1"], "public.test": ["127.0.0.1"]})
    error = await refused(
        AdapterSources(policy, resolve=resolver), "hf://org/name", tmp_path / "in"
    )
    assert error.code == "redirect_not_allowed"
    assert set(resolver.asked) == {"hub.test"}
    assert hub.paths == [CONFIG_PATH, WEIGHTS_PATH]


async def test_redirects_in_a_circle_end(hub: FakeHub, tmp_path: Path):
    hub.replies[CONFIG_PATH] = Reply(status=301, headers={"location": CONFIG_PATH})
    error = await refused(
        AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL)),
        "hf://org/name",
        tmp_path / "i",
    )
    assert error.code == "source_unavailable"
    assert len(hub.requests) == 6


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.1"], ["172.16.0.1"], ["192.168.0.1"], ["169.254.169.254"],
        ["100.64.0.1"], ["0.0.0.0"], ["::1"], ["fe80::1%eth0"], ["fd00:ec2::254"],
        ["::ffff:10.0.0.1"], ["64:ff9b::a00:1"], ["2002:a00:1::"], ["224.0.0.1"], ["240.0.0.1"],
        ["168.63.129.16"], ["::"], ["nonsense"],
        ["93.184.216.34", "10.0.0.1"],  # one of them is enough
    ],
)  # fmt: skip
async def test_hosts_with_an_address_that_is_not_public_are_not_called(
    hub: FakeHub, tmp_path: Path, addresses: Sequence[str]
):
    """First as the hub itself, then as where it redirects to."""
    resolver = FakeResolver({"hub.test": addresses})
    policy = policy_for(hub, hub_url="https://hub.test", private_hosts=())
    error = await refused(AdapterSources(policy, resolve=resolver), "hf://org/name", tmp_path / "a")
    assert error.code == "private_address"
    hub.replies[CONFIG_PATH] = Reply(status=302, headers={"location": "https://evil.test/x"})
    resolver = FakeResolver(LOCAL | {"evil.test": addresses})
    policy = policy_for(hub, hub_redirect_hosts=("evil.test",))
    error = await refused(AdapterSources(policy, resolve=resolver), "hf://org/name", tmp_path / "b")
    assert error.code == "private_address"
    assert not any(address in str(error) for address in addresses)


async def test_a_name_that_changes_its_meaning_changes_nothing(hub: FakeHub, tmp_path: Path):
    """Rebinding: the address that was checked is the one that is called; nobody asks again."""

    class Rebinding(FakeResolver):
        async def __call__(self, host: str, port: int) -> Sequence[str]:
            self.asked.append(host)
            return ["127.0.0.1"] if len(self.asked) <= 2 else ["203.0.113.1"]

    resolver = Rebinding({})
    await fetch(AdapterSources(policy_for(hub), resolve=resolver), "hf://org/name", tmp_path / "in")
    assert resolver.asked == ["hub.test", "hub.test"]  # one for each file


async def test_the_next_address_is_tried_where_one_does_not_answer(hub: FakeHub, tmp_path: Path):
    resolver = FakeResolver({"hub.test": ["127.0.0.9", "127.0.0.1"]})
    await fetch(AdapterSources(policy_for(hub), resolve=resolver), "hf://org/name", tmp_path / "in")


@pytest.mark.parametrize("has_length", [True, False])
async def test_the_cap_is_on_what_is_received(hub: FakeHub, tmp_path: Path, has_length: bool):
    hub.replies[WEIGHTS_PATH] = Reply(WEIGHTS, has_length=has_length)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    whole = len(CONFIG) + len(WEIGHTS)
    error = await refused(sources, "hf://org/name", tmp_path / "a", max_bytes=whole - 1)
    assert error.code == "source_too_large"
    fetched = await fetch(sources, "hf://org/name", tmp_path / "b", max_bytes=whole)
    assert fetched.weights.stat().st_size == len(WEIGHTS)


async def test_a_config_is_capped_on_its_own(hub: FakeHub, tmp_path: Path):
    hub.replies[CONFIG_PATH] = Reply(b"{}" + b" " * (2 << 20), has_length=False)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    error = await refused(sources, "hf://org/name", tmp_path / "in")
    assert error.code == "source_too_large"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply(WEIGHTS, length=len(WEIGHTS) + 5), "source_unavailable"),  # cut short
        (Reply(WEIGHTS, headers={"content-encoding": "gzip"}), "source_unavailable"),
        (Reply(status=404), "source_not_found"),
        (Reply(status=401), "source_denied"),
        (Reply(status=403), "source_denied"),
        (Reply(status=500), "source_unavailable"),
        (Reply(status=206, body=WEIGHTS), "source_unavailable"),
        (Reply(status=302), "source_unavailable"),
        (Reply(status=302, headers={"location": "http://[::1"}), "source_unavailable"),
        (Reply(headers={"x": "y" * 200_000}), "source_unavailable"),
    ],
)
async def test_what_a_hub_does_wrong_has_a_reason_code(
    hub: FakeHub, tmp_path: Path, reply: Reply, code: str
):
    hub.replies[WEIGHTS_PATH] = reply
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    error = await refused(sources, "hf://org/name", tmp_path / "in")
    assert error.code == code


async def test_more_than_was_announced_is_not_taken(hub: FakeHub, tmp_path: Path):
    hub.replies[WEIGHTS_PATH] = Reply(WEIGHTS, length=100)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    fetched = await fetch(sources, "hf://org/name", tmp_path / "in")
    assert fetched.weights.read_bytes() == WEIGHTS[:100]


async def test_a_slow_source_meets_its_deadline(hub: FakeHub, tmp_path: Path):
    hub.replies[WEIGHTS_PATH] = Reply(WEIGHTS[:100], length=len(WEIGHTS), stalls=True)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    error = await refused(sources, "hf://org/name", tmp_path / "in", seconds=0.3)
    assert error.code == "source_timeout"


async def test_nobody_there_is_told_without_an_address(tmp_path: Path):
    policy = SourcePolicy(hub_url="http://hub.test:9", private_hosts=("hub.test",))
    sources = AdapterSources(policy, resolve=FakeResolver(LOCAL))
    error = await refused(sources, "hf://org/name", tmp_path / "a")
    assert (error.code, "127.0.0.1" in error.message) == ("source_unavailable", False)
    sources = AdapterSources(policy, resolve=FakeResolver({}))
    assert (await refused(sources, "hf://org/name", tmp_path / "b")).code == "source_unavailable"


async def test_a_token_goes_to_the_hub_for_its_grant_and_to_no_other_host(
    hub: FakeHub, tmp_path: Path
):
    hub.replies["/files/w"] = Reply(WEIGHTS)
    hub.replies[WEIGHTS_PATH] = Reply(
        status=302, headers={"location": f"{hub.origin('cdn.test')}/files/w"}
    )
    policy = policy_for(
        hub,
        credentials={"acme-hub": HubCredential(token_env="HUB", token="s3cret")},
        grants=(Grant(tenant="acme", source="hf://org", credential="acme-hub"),),
    )
    sources = AdapterSources(policy, resolve=FakeResolver(LOCAL))
    await fetch(sources, "hf://org/name", tmp_path / "a")
    sent = [request.headers.get("authorization") for request in hub.requests]
    assert sent == ["bearer s3cret", "bearer s3cret", None]
    hub.requests.clear()
    await fetch(sources, "hf://org/name", tmp_path / "b", tenant="zen")
    assert all("authorization" not in request.headers for request in hub.requests)


def certificate(folder: Path, host: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for `host`, and a client's that trusts only that certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    file = folder / "server.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    client = ssl.create_default_context(
        cadata=signed.public_bytes(serialization.Encoding.PEM).decode()
    )
    return server, client


@pytest.mark.parametrize("certified", ["hub.test", "other.test"])
async def test_the_certificate_must_be_the_names_though_the_address_is_called(
    tmp_path: Path, certified: str
):
    server, client = certificate(tmp_path, certified)
    async with fake_hub(server) as hub:
        hub.publish("org/name", CONFIG, WEIGHTS)
        policy = policy_for(hub, hub_url=hub.origin(scheme="https"))
        sources = AdapterSources(policy, resolve=FakeResolver(LOCAL), tls=client)
        if certified == "hub.test":
            await fetch(sources, "hf://org/name", tmp_path / "in")
        else:
            error = await refused(sources, "hf://org/name", tmp_path / "in")
            assert error.code == "source_unavailable"
            assert hub.requests == []


async def test_cancelling_a_fetch_lets_go(hub: FakeHub, tmp_path: Path):
    hub.replies[WEIGHTS_PATH] = Reply(WEIGHTS[:100], length=len(WEIGHTS), stalls=True)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    task = asyncio.create_task(fetch(sources, "hf://org/name", tmp_path / "in"))
    while len(hub.requests) < 2:  # noqa: ASYNC110 - the hub is a stranger
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
