"""References to objects of buckets."""

from pathlib import Path

import pytest

from adapter_store.references.policy import Grant, S3Credential, SourcePolicy
from adapter_store.references.sources import AdapterSources
from tests.support.s3 import S3Server
from tests.support.source_calls import CONFIG, WEIGHTS, fetch, refused

pytestmark = pytest.mark.anyio


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
    file = s3_file(reference, "f", policy, policy.credential_for(reference, "acme"))
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
    plain = s3_file(S3Reference("buck", "a b/c+d", "eu-west-1"), "f", policy, None)
    assert plain.url == "https://buck.s3.eu-west-1.amazonaws.com/a%20b/c%2Bd/f"
    assert plain.redirect_hosts == ("buck.s3.*.amazonaws.com",)
    dotted = s3_file(S3Reference("my.buck", ""), "f", policy, None)
    assert dotted.url == "https://s3.us-east-1.amazonaws.com/my.buck/f"
