"""Fetch an adapter by reference: exactly its two files, under the operator's rules."""

import asyncio
import dataclasses
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter_store.digest import CONFIG_FILE, WEIGHTS_FILE
from adapter_store.errors import SourceError
from adapter_store.peft_config import MAX_CONFIG_BYTES
from adapter_store.references.addresses import Resolver, system_resolver
from adapter_store.references.download import Downloader, default_tls
from adapter_store.references.local_files import copy_file
from adapter_store.references.locations import hub_file, s3_file
from adapter_store.references.policy import Credential, SourcePolicy
from adapter_store.references.reference import (
    FileReference,
    HubReference,
    Reference,
    S3Reference,
)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_COMMIT_HEADER = "x-repo-commit"

Progress = Callable[[int, int | None], None]
"""Told the bytes received so far and, once known, the bytes of both files."""


@dataclass(frozen=True, slots=True)
class FetchedAdapter:
    """The two files, and the reference as it was found: a branch has become its commit."""

    config: bytes
    weights: Path
    reference: Reference


@dataclass(frozen=True, slots=True)
class _Limits:
    max_bytes: int
    progress: Progress


class AdapterSources:
    """What may be registered by reference, and how it is got."""

    def __init__(
        self,
        policy: SourcePolicy,
        *,
        roots: Sequence[Path] = (),
        own_bucket: str | None = None,
        resolve: Resolver = system_resolver,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._roots = tuple(roots)
        self._own_bucket = own_bucket
        self._downloader = Downloader(
            frozenset(policy.private_hosts), resolve, tls or default_tls()
        )

    @property
    def policy(self) -> SourcePolicy:
        """The operator's rules."""
        return self._policy

    def check(
        self,
        reference: Reference,
        tenant: str,
        granted: Mapping[str, str | None] | None = None,
        *,
        is_admin: bool,
    ) -> None:
        """Raise `SourceError` for what the tenant may not name, before anything is looked up.

        `granted` is what admins let it use beside the operator's file, see `SourcePolicy`.
        """
        self._credential(reference, tenant, granted, is_admin)

    async def fetch(
        self,
        reference: Reference,
        tenant: str,
        into: Path,
        granted: Mapping[str, str | None] | None = None,
        *,
        is_admin: bool,
        max_bytes: int,
        seconds: float,
        progress: Progress,
    ) -> FetchedAdapter:
        """Fetch both files into the folder `into`; `max_bytes` caps them together.

        Raises `SourceError`, or `OSError` where the disk is at fault.
        """
        credential = self._credential(reference, tenant, granted, is_admin)
        limits = _Limits(max_bytes, progress)
        try:
            async with asyncio.timeout(seconds):
                return await self._fetch(reference, credential, into, limits)
        except TimeoutError:
            raise SourceError(
                "source_timeout", f"the source was not there whole in {seconds:g} s"
            ) from None

    def _credential(
        self,
        reference: Reference,
        tenant: str,
        granted: Mapping[str, str | None] | None,
        is_admin: bool,
    ) -> Credential | None:
        if isinstance(reference, FileReference):
            if not is_admin:
                raise SourceError("source_not_allowed", "file:// sources are for admins")
            if not self._roots:
                raise SourceError("source_not_allowed", "the service has no --adapter-root")
            return None
        if isinstance(reference, S3Reference) and reference.bucket == self._own_bucket:
            raise SourceError("source_not_allowed", "the service's own bucket is no source")
        return self._policy.credential_for(reference, tenant, granted)

    async def _fetch(
        self, reference: Reference, credential: Credential | None, into: Path, limits: _Limits
    ) -> FetchedAdapter:
        config, weights = into / CONFIG_FILE, into / WEIGHTS_FILE
        found = await self._get(reference, credential, config, 0, limits)
        config_bytes = await asyncio.to_thread(config.read_bytes)
        await self._get(found, credential, weights, len(config_bytes), limits)
        return FetchedAdapter(config_bytes, weights, found)

    async def _get(
        self,
        reference: Reference,
        credential: Credential | None,
        target: Path,
        before: int,
        limits: _Limits,
    ) -> Reference:
        """Get one file; `before` bytes came already. Return the reference for the next one."""
        name = target.name
        most = MAX_CONFIG_BYTES if name == CONFIG_FILE else limits.max_bytes - before
        if isinstance(reference, FileReference):
            size = await copy_file(Path(reference.path), name, self._roots, target, most)
            limits.progress(before + size, before + size if name == WEIGHTS_FILE else None)
            return reference

        def progress(received: int, announced: int | None) -> None:
            is_last = name == WEIGHTS_FILE and announced is not None
            limits.progress(before + received, before + (announced or 0) if is_last else None)

        if isinstance(reference, HubReference):
            file = hub_file(reference, name, self._policy, credential)
        else:
            file = s3_file(reference, name, self._policy, credential)
        headers = await self._downloader.download(file, target, max_bytes=most, progress=progress)
        # Both files of one commit, whatever is pushed meanwhile.
        commit = headers.get(_COMMIT_HEADER, "")
        if isinstance(reference, HubReference) and _COMMIT.fullmatch(commit):
            return dataclasses.replace(reference, revision=commit)
        return reference
