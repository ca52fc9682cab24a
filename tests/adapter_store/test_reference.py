import pytest

from adapter_store.errors import SourceError
from adapter_store.references.reference import (
    FileReference,
    HubReference,
    S3Reference,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("hf://org/name", HubReference("org/name", "main")),
        ("hf://Org-1/na.me_2@v1.0", HubReference("Org-1/na.me_2", "v1.0")),
        ("hf://org/name@refs/pr/12", HubReference("org/name", "refs/pr/12")),
        ("s3://my-bucket", S3Reference("my-bucket", "")),
        ("s3://my-bucket/", S3Reference("my-bucket", "")),
        ("s3://my.bucket/a/b c".replace(" ", "+"), S3Reference("my.bucket", "a/b+c")),
        ("s3://my-bucket/a/?region=eu-west-1", S3Reference("my-bucket", "a", "eu-west-1")),
        ("file:///srv/adapters/one", FileReference("/srv/adapters/one")),
        ("file:///srv/adapters/one/", FileReference("/srv/adapters/one")),
    ],
)
def test_references_are_read(text: str, reference: object):
    parsed = parse_reference(text)
    assert parsed == reference
    assert parse_reference(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "", "org/name", "http://host/x", "https://huggingface.co/org/name", "HF://org/name",
        "hf://org", "hf://org/", "hf:///name", "hf://org/name/file", "hf://org/name@",
        "hf://../name", "hf://org/..", "hf://org/name@..", "hf://org/name@a/../b",
        "hf://org/name@a//b", "hf://org/name@/a", "hf://org/na\0me", "hf://org/name@a\n",
        "hf://user@org/name", "hf://org%2fname/x", "hf://\u043erg/name", "hf://org\\x/name",
        "hf://org/name?x=1", "hf://org/name#x", "hf://" + "a" * 97 + "/name",
        "s3://", "s3://B", "s3://Bucket/x", "s3://bucket/../x", "s3://bucket/a/./b",
        "s3://bucket/a//b", "s3://bucket//a", "s3://bucket/%2e%2e/x", "s3://bucket/a\\b",
        "s3://bucket/a?x=1", "s3://bucket/a?region=eu.evil.com", "s3://key:secret@bucket/x",
        "s3://point-s3alias/x", "s3://point--ol-s3/x", "s3://bucket/a#b", "s3://bucket/\0",
        "s3://bucket/ключ", "s3://127.0.0.1:9000/x",
        "file://", "file://relative", "file:///a/../b", "file:////host/share", "file:///a\0b",
        "file://localhost/a", "file:///a%2fb", "file:///a\\b", "file:///a\nb", "file:///a/./b",
        "hf://org/" + "n" * 10_000, "s3://bucket/" + "k" * 10_000, "file:///" + "f" * 10_000,
    ],
)  # fmt: skip
def test_what_could_mean_something_else_is_refused(text: str):
    with pytest.raises(SourceError) as caught:
        parse_reference(text)
    assert caught.value.code == "invalid_source"
    assert len(caught.value.message) < 200
