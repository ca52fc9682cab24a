"""From a reference to the URLs of its two files. Nothing is asked of anybody here."""

from datetime import timedelta
from urllib.parse import quote

import obstore
from obstore.store import S3Store

from adapter_store.references.download import RemoteFile
from adapter_store.references.policy import (
    Credential,
    HubCredential,
    S3Credential,
    SourcePolicy,
)
from adapter_store.references.reference import HubReference, S3Reference

_SIGNED_FOR = timedelta(hours=1)
"""Longer than any fetch may take."""


def hub_file(
    reference: HubReference, name: str, policy: SourcePolicy, credential: Credential | None
) -> RemoteFile:
    """A file of a repository; without a credential the request is anonymous."""
    revision = quote(reference.revision, safe="")
    headers = {}
    if isinstance(credential, HubCredential):
        headers["authorization"] = f"Bearer {credential.token}"
    return RemoteFile(
        f"{policy.hub_url}/{reference.repository}/resolve/{revision}/{name}",
        policy.hub_redirect_hosts,
        headers,
    )


def s3_file(
    reference: S3Reference,
    name: str,
    policy: SourcePolicy,
    credential: Credential | None,
) -> RemoteFile:
    """An object of a bucket: with a credential a signed URL, else a plain one."""
    key = f"{reference.prefix}/{name}" if reference.prefix else name
    if isinstance(credential, S3Credential):
        # A signature is for one host: there is nowhere to redirect it to.
        return RemoteFile(_signed(reference.bucket, key, credential))
    path = quote(key, safe="/!_.*'()-")
    if policy.s3_endpoint is not None:
        return RemoteFile(f"{policy.s3_endpoint}/{reference.bucket}/{path}")
    region = reference.region or "us-east-1"
    if "." in reference.bucket:  # no certificate would fit
        return RemoteFile(f"https://s3.{region}.amazonaws.com/{reference.bucket}/{path}")
    host = f"{reference.bucket}.s3"
    # AWS knows the bucket's region better; the bucket stays the same.
    return RemoteFile(f"https://{host}.{region}.amazonaws.com/{path}", (f"{host}.*.amazonaws.com",))


def _signed(bucket: str, key: str, credential: S3Credential) -> str:
    # Everything that the environment could put in instead is given, and the credential by a
    # callback: else a session token of the process's own would be signed along.
    store = S3Store(
        bucket,
        endpoint=credential.endpoint or f"https://s3.{credential.region}.amazonaws.com",
        region=credential.region,
        virtual_hosted_style_request=False,
        skip_signature=False,
        request_payer=False,
        client_options={"allow_http": True},
        credential_provider=lambda: {
            "access_key_id": credential.access_key_id,
            "secret_access_key": credential.secret_access_key,
            "token": None,
            "expires_at": None,
        },
    )
    return obstore.sign(store, "GET", key, _SIGNED_FOR)
