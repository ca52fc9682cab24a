"""Canaries: a share of an alias's requests goes to a second version.

Who gets it is a hash of the alias, the canary's version and the request's routing key (its `user`
or `prompt_cache_key`, else its own id), below the share. So a user stays with what they got,
raising the share moves users to the canary and none back, and the next canary's first users are
others.
"""

import hashlib


def takes_canary(alias: str, version: int, share: float, routing_key: str) -> bool:
    """Whether the request with this key gets `version`; `alias` is `tenant/name:alias`."""
    text = f"{alias}\0{version}\0{routing_key}".encode(errors="surrogatepass")
    point = int.from_bytes(hashlib.sha256(text).digest()[:8])
    # Integers on both sides: a share of 1.0 takes every point, one of 0.0 none.
    return point < int(share * 2**64)
