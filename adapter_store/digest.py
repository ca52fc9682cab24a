"""The digest of an adapter: its identity in slots, caches and blobs."""

import hashlib
import re
from pathlib import Path

from adapter_store.errors import AdapterFormatError
from adapter_store.peft_config import PeftConfig, parse_config

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""The two files of an adapter, as PEFT saves them and wherever they lie by digest."""

_VERSION = b"loraplex-1"
_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether `text` is 64 lower-case hex digits: the only thing that may become a path."""
    return _DIGEST.fullmatch(text) is not None


def hash_files(config: bytes, weights: Path) -> str:
    """The digest of `adapter_config.json` (its bytes) and the safetensors file, in hex.

    Raises AdapterFormatError if the config cannot be parsed or the file changes meanwhile.
    """
    return hash_adapter(parse_config(config), weights)


def hash_adapter(config: PeftConfig, weights: Path) -> str:
    """The digest (`AdapterHasher`) of a parsed config and a file; raises as `hash_files` does."""
    with weights.open("rb") as file:
        hasher = AdapterHasher(config, file.seek(0, 2))
        file.seek(0)
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


class AdapterHasher:
    """SHA-256 over `loraplex-1`, the config's canonical JSON, and the file's bytes as they are.

    Each part comes after its length (8 bytes, little endian). The canonical JSON holds only fields
    that change the result, defaults filled in, so that a config re-saved by another version of PEFT
    keeps its digest. The file's bytes are given in chunks, to `update`.
    """

    def __init__(self, config: PeftConfig, weights_bytes: int) -> None:
        self._digest = hashlib.sha256()
        for part in (_VERSION, config.canonical_json()):
            self._digest.update(len(part).to_bytes(8, "little"))
            self._digest.update(part)
        self._digest.update(weights_bytes.to_bytes(8, "little"))
        self._left = weights_bytes

    def update(self, chunk: bytes) -> None:
        """Take the file's next bytes."""
        self._digest.update(chunk)
        self._left -= len(chunk)

    def hexdigest(self) -> str:
        """The digest; raises AdapterFormatError if other than the announced bytes came."""
        if self._left:
            raise AdapterFormatError("file_changed", "the weights file changed while it was read")
        return self._digest.hexdigest()
