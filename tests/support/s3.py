"""An S3 service on loopback: moto's server, one a session, with a bucket for each test."""

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

KEY_ID, SECRET = "test-key-id", "test-secret"

# moto looks whether a call is signed, not with what; an unsigned one sees public objects only.
_SIGNED = {
    "authorization": f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20300101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


@dataclass
class S3Server:
    """`endpoint` answers to any credentials."""

    endpoint: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def make_bucket(self, name: str | None = None) -> str:
        bucket = name or f"bucket-{next(self._numbers)}"
        self._call("PUT", bucket)
        return bucket

    def put(self, bucket: str, key: str, content: bytes, *, public: bool = False) -> None:
        headers = {"x-amz-acl": "public-read"} if public else {}
        self._call("PUT", f"{bucket}/{key}", content=content, headers=_SIGNED | headers)

    def delete(self, bucket: str, key: str) -> None:
        self._call("DELETE", f"{bucket}/{key}")

    def keys(self, bucket: str) -> list[str]:
        return re.findall("<Key>(.*?)</Key>", self._call("GET", bucket).text)

    def unfinished_uploads(self, bucket: str) -> int:
        return self._call("GET", f"{bucket}?uploads").text.count("<Upload>")

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        url = f"{self.endpoint}/{path}"
        reply = httpx.request(method, url, trust_env=False, **{"headers": _SIGNED} | arguments)
        return reply.raise_for_status()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer  # a second, which only these tests shall pay

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}")
    server.stop()


@pytest.fixture
def aws_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's own, as the blob store finds them in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
