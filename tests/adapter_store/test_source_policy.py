import json
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import SourceError
from adapter_store.references.policy import (
    HubCredential,
    PolicyError,
    S3Credential,
    SourcePolicy,
)
from adapter_store.references.reference import parse_reference

ENVIRON = {"HUB": "hub-secret", "ID": "key-id", "KEY": "key-secret", "EMPTY": ""}
DOCUMENT: dict[str, Any] = {
    "credentials": {
        "acme-hub": {"type": "hub", "token_env": "HUB"},
        "lake": {"type": "s3", "access_key_id_env": "ID", "secret_access_key_env": "KEY"},
    },
    "grants": [
        {"tenant": "acme", "source": "hf://acme-org", "credential": "acme-hub"},
        {"tenant": "acme", "source": "hf://open-org"},
        {"tenant": "acme", "source": "s3://lake/team/a", "credential": "lake"},
        {"tenant": "acme", "source": "s3://lake"},
    ],
}


def load(folder: Path, **changes: Any) -> SourcePolicy:
    file = folder / "sources.json"
    file.write_text(json.dumps(DOCUMENT | changes))
    return SourcePolicy.load(file, ENVIRON)


@pytest.mark.parametrize(
    ("tenant", "source", "secret"),
    [
        ("acme", "hf://acme-org/one@v1", "hub-secret"),
        ("acme", "hf://acme-org2/one", None),
        ("acme", "hf://open-org/one", None),
        ("zen", "hf://acme-org/one", None),
        ("acme", "s3://lake/team/a", "key-secret"),
        ("acme", "s3://lake/team/a/deeper", "key-secret"),
        ("acme", "s3://lake/team/ab", None),
        ("acme", "s3://lake/team", None),
        ("acme", "s3://lake2/team/a", None),
        ("zen", "s3://lake/team/a", None),
    ],
)
def test_a_credential_is_used_for_what_it_was_granted_for_and_for_nothing_else(
    tmp_path: Path, tenant: str, source: str, secret: str | None
):
    found = load(tmp_path).credential_for(parse_reference(source), tenant)
    if isinstance(found, HubCredential):
        assert found.token == secret
    elif isinstance(found, S3Credential):
        assert found.secret_access_key == secret
    else:
        assert secret is None


def test_without_public_sources_only_grants_count(tmp_path: Path):
    policy = load(tmp_path, public_sources=False)
    assert policy.credential_for(parse_reference("hf://open-org/x"), "acme") is None
    for tenant, source in (("acme", "hf://other/x"), ("zen", "hf://acme-org/x")):
        with pytest.raises(SourceError) as caught:
            policy.credential_for(parse_reference(source), tenant)
        assert caught.value.code == "source_not_allowed"


def test_no_secret_is_ever_shown(tmp_path: Path):
    policy = load(tmp_path)
    for shown in (repr(policy), str(policy), f"{policy.credentials}"):
        assert "secret" not in shown and "key-id" not in shown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unknown": 1}, "unknown"),
        ({"credentials": {"x": {"type": "hub", "token_env": "NO"}}}, "NO"),
        ({"credentials": {"x": {"type": "hub", "token": "t", "token_env": "HUB"}}}, "variables"),
        ({"credentials": {"x": {"type": "hub", "token_env": "EMPTY"}}, "grants": []}, "EMPTY"),
        ({"credentials": {}}, "'acme-hub'"),
        ({"grants": [{"tenant": "a", "source": "hf://org", "credential": "lake"}]}, "'lake'"),
        ({"grants": [{"tenant": "a", "source": "hf://org/name"}]}, "hf://org/name"),
        ({"grants": [{"tenant": "a", "source": "file:///srv"}]}, "file:///srv"),
        ({"grants": [{"tenant": "a", "source": "s3://../x"}]}, "s3://../x"),
        ({"hub_url": "ftp://hub"}, "ftp://hub"),
        ({"hub_url": "https://user:pw@hub"}, "must be like"),
        ({"hub_url": "http://hub.example.com"}, "private_hosts"),
        ({"s3_endpoint": "http://store:9000"}, "private_hosts"),
    ],
)
def test_a_faulty_file_is_refused_by_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], expected: str
):
    if "credentials" in changes and changes["credentials"] and "grants" not in changes:
        changes = changes | {"grants": []}
    with pytest.raises(PolicyError, match=r"sources\.json|credential") as caught:
        load(tmp_path, **changes)
    assert expected in str(caught.value)


def test_a_missing_or_malformed_file_is_refused(tmp_path: Path):
    with pytest.raises(PolicyError, match="No such file"):
        SourcePolicy.load(tmp_path / "none.json", {})
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PolicyError, match="bad"):
        SourcePolicy.load(tmp_path / "bad.json", {})
