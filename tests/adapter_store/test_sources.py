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

from adapter_store.errors import SourceError
from adapter_store.references.policy import Grant, HubCredential, S3Credential, SourcePolicy
from adapter_store.references.reference import parse_reference
from adapter_store.references.sources import AdapterSources, FetchedAdapter
from tests.support.fake_hub import COMMIT, FakeHub, FakeResolver, Reply, fake_hub
from tests.support.s3 import S3Server

pytestmark = pytest.mark.anyio

CONFIG, WEIGHTS = b'{"peft_type": "LORA"}', bytes(range(256)) * 8192
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


async def fetch(
    sources: AdapterSources,
    text: str,
    into: Path,
    *,
    tenant: str = "acme",
    is_admin: bool = False,
    max_bytes: int = 10 << 20,
    seconds: float = 20.0,
    seen: list[tuple[int, int | None]] | None = None,
) -> FetchedAdapter:
    os.makedirs(into, exist_ok=True)
    told = [] if seen is None else seen
    return await sources.fetch(
        parse_reference(text), tenant, into, is_admin=is_admin, max_bytes=max_bytes,
        seconds=seconds, progress=lambda *step: told.append(step),
    )  # fmt: skip


async def refused(sources: AdapterSources, text: str, into: Path, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        await fetch(sources, text, into, **options)
    return caught.value


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


# Buckets


def s3_policy(server: S3Server, bucket: str | None = None) -> SourcePolicy:
    credential = S3Credential(
        access_key_id_env="I", secret_access_key_env="K", access_key_id="named-id",
        secret_access_key="named-key", endpoint=server.endpoint,
    )  # fmt: skip
    grants = [Grant(tenant="acme", source=f"s3://{bucket}/private", credential="lake")]
    return SourcePolicy(
        s3_endpoint=server.endpoint, private_hosts=("127.0.0.1",), credentials={"lake": credential},
        grants=tuple(grants) if bucket else (),
    )  # fmt: skip


async def test_public_objects_are_fetched_unsigned_and_private_ones_are_not_to_be_had(
    s3_server: S3Server, tmp_path: Path, aws_credentials: None
):
    bucket = s3_server.make_bucket()
    for folder, public in (("public", True), ("hidden", False)):
        s3_server.put(bucket, f"{folder}/adapter_config.json", CONFIG, public=public)
        s3_server.put(bucket, f"{folder}/adapter_model.safetensors", WEIGHTS, public=public)
    sources = AdapterSources(s3_policy(s3_server))
    fetched = await fetch(sources, f"s3://{bucket}/public/", tmp_path / "a")
    assert (fetched.config, fetched.weights.read_bytes()) == (CONFIG, WEIGHTS)
    error = await refused(sources, f"s3://{bucket}/hidden", tmp_path / "b")
    assert error.code == "source_denied"  # though the process has credentials of its own
    error = await refused(sources, f"s3://{bucket}/none", tmp_path / "c")
    assert error.code in ("source_not_found", "source_denied")


async def test_a_granted_prefix_is_fetched_with_its_named_credential_alone(
    s3_server: S3Server, tmp_path: Path, aws_credentials: None, monkeypatch: pytest.MonkeyPatch
):
    from adapter_store.references.locations import s3_file
    from adapter_store.references.reference import S3Reference

    monkeypatch.setenv("AWS_SESSION_TOKEN", "ambient-session")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://ambient.test")
    bucket = s3_server.make_bucket()
    s3_server.put(bucket, "private/a/adapter_config.json", CONFIG)
    s3_server.put(bucket, "private/a/adapter_model.safetensors", WEIGHTS)
    policy = s3_policy(s3_server, bucket)
    fetched = await fetch(AdapterSources(policy), f"s3://{bucket}/private/a", tmp_path / "a")
    assert (fetched.config, fetched.weights.read_bytes()) == (CONFIG, WEIGHTS)
    error = await refused(
        AdapterSources(policy), f"s3://{bucket}/private/a", tmp_path / "b", tenant="zen"
    )
    assert error.code == "source_denied"
    reference = S3Reference(bucket, "private/a")
    file = s3_file(reference, "f", policy, policy.credential_for(reference, "acme"), None)
    assert f"{s3_server.endpoint}/{bucket}/private/a/f?" in file.url
    assert "X-Amz-Credential=named-id%2F" in file.url
    assert "ambient" not in file.url and "named-key" not in file.url
    assert "named" not in repr(file)


async def test_the_services_own_bucket_is_no_source(s3_server: S3Server, tmp_path: Path):
    bucket = s3_server.make_bucket()
    sources = AdapterSources(s3_policy(s3_server, bucket), own_bucket=bucket)
    for text in (f"s3://{bucket}/private/a", f"s3://{bucket}"):
        error = await refused(sources, text, tmp_path / "in")
        assert error.code == "source_not_allowed"


def test_a_bucket_of_aws_is_found_by_its_region_and_stays_the_same_by_redirects():
    from adapter_store.references.locations import s3_file
    from adapter_store.references.reference import S3Reference

    policy = SourcePolicy()
    plain = s3_file(S3Reference("buck", "a b/c+d", "eu-west-1"), "f", policy, None, None)
    assert plain.url == "https://buck.s3.eu-west-1.amazonaws.com/a%20b/c%2Bd/f"
    assert plain.redirect_hosts == ("buck.s3.*.amazonaws.com",)
    dotted = s3_file(S3Reference("my.buck", ""), "f", policy, None, None)
    assert dotted.url == "https://s3.us-east-1.amazonaws.com/my.buck/f"


# The service's own machine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root" / "one"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    return tmp_path / "root"


async def test_files_under_a_root_are_copied_for_admins_only(root: Path, tmp_path: Path):
    sources = AdapterSources(SourcePolicy(), roots=[root])
    text = f"file://{root}/one"
    fetched = await fetch(sources, text, tmp_path / "a", is_admin=True)
    assert (fetched.config, fetched.weights.read_bytes()) == (CONFIG, WEIGHTS)
    assert fetched.weights.parent == tmp_path / "a"
    assert sorted(os.listdir(tmp_path / "a")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (await refused(sources, text, tmp_path / "b")).code == "source_not_allowed"
    without = AdapterSources(SourcePolicy())
    error = await refused(without, text, tmp_path / "b", is_admin=True)
    assert error.code == "source_not_allowed"
    error = await refused(sources, text, tmp_path / "b", is_admin=True, max_bytes=len(WEIGHTS))
    assert error.code == "source_too_large"


async def test_links_are_followed_within_the_root_and_never_out_of_it(root: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_config.json").write_bytes(CONFIG)
    (outside / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (root / "inner-link").symlink_to(root / "one")
    (root / "outer-link").symlink_to(outside)
    (root / "file-link").mkdir()
    (root / "file-link" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (root / "circle").symlink_to(root / "circle")
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "folder").mkdir()
    (root / "folder" / "adapter_config.json").mkdir()
    (tmp_path / "root2").symlink_to(outside)  # shares the root's name as a prefix
    sources = AdapterSources(SourcePolicy(), roots=[root])
    await fetch(sources, f"file://{root}/inner-link", tmp_path / "a", is_admin=True)
    for number, (folder, code) in enumerate(
        {
            f"{root}/outer-link": "source_not_allowed",
            f"{root}/file-link": "source_not_allowed",
            f"{root}2": "source_not_allowed",
            str(outside): "source_not_allowed",
            f"{root}/circle": "source_not_found",
            f"{root}/pipe": "source_not_found",
            f"{root}/folder": "source_not_found",
            f"{root}/none": "source_not_found",
            "/etc": "source_not_allowed",
            "/no-such-folder": "source_not_allowed",  # nothing tells what there is elsewhere
        }.items()
    ):
        error = await refused(sources, f"file://{folder}", tmp_path / f"b{number}", is_admin=True)
        assert error.code == code, folder
        assert "adapter_model" not in str(error)


async def test_a_link_that_is_put_in_the_way_meanwhile_is_not_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "adapter_config.json").write_bytes(b"a secret")
    real = Path.resolve

    def resolve_then_swap(self: Path, strict: bool = False) -> Path:
        found = real(self, strict=strict)
        if self.name == "adapter_config.json":
            (root / "one").rename(root / "moved")
            (root / "one").symlink_to(outside)
        return found

    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    sources = AdapterSources(SourcePolicy(), roots=[root])
    error = await refused(sources, f"file://{root}/one", tmp_path / "a", is_admin=True)
    assert error.code == "source_not_found"


async def test_cancelling_a_fetch_lets_go(hub: FakeHub, tmp_path: Path):
    hub.replies[WEIGHTS_PATH] = Reply(WEIGHTS[:100], length=len(WEIGHTS), stalls=True)
    sources = AdapterSources(policy_for(hub), resolve=FakeResolver(LOCAL))
    task = asyncio.create_task(fetch(sources, "hf://org/name", tmp_path / "in"))
    while len(hub.requests) < 2:  # noqa: ASYNC110 - the hub is a stranger
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
