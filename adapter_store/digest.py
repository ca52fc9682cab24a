"""The digest of an adapter: its identity in slots, caches and blobs."""

import hashlib
from pathlib import Path

from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig, parse_config

_VERSION = b"loraplex-1"
_CHUNK_BYTES = 1 << 20


def hash_files(config: bytes, weights: Path) -> str:
    """The digest of `adapter_config.json` (its bytes) and the safetensors file, in hex.

    Raises AdapterFormatError if the config cannot be parsed or the file changes meanwhile.
    """
    return hash_adapter(parse_config(config), weights)


def hash_adapter(config: PeftConfig, weights: Path) -> str:
    """SHA-256 over `loraplex-1`, the config's canonical JSON, and the file's bytes as they are.

    Each part comes after its length (8 bytes, little endian). The canonical JSON holds only fields
    that change the result, defaults filled in, so that a config re-saved by another version of PEFT
    keeps its digest.
    """
    digest = hashlib.sha256()
    for part in (_VERSION, config.canonical_json()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    with weights.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest.update(size.to_bytes(8, "little"))
        left = size
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            left -= len(chunk)
    if left:
        raise AdapterFormatError("file_changed", "the weights file changed while it was read")
    return digest.hexdigest()
