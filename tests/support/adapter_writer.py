"""Uploads versions, moves an alias and deletes, over and over; knows what must be there after."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import httpx

Upload = Callable[[httpx.AsyncClient, str, int], Awaitable[httpx.Response]]
"""Uploads to an adapter's name what no other number has."""


class Writer:
    """Keeps what was acknowledged, while whoever acknowledges it is killed now and then."""

    def __init__(self, url: str, admin_key: str, upload: Upload, name: str, seed: int) -> None:
        self.name = name
        self.kept: dict[int, str] = {}
        """Digests of versions that must be there."""
        self.gone: set[int] = set()
        """Versions that must not be there."""
        self.unsure: set[int] = set()
        """Versions that were to be deleted when the answer failed to come."""
        self.num_acknowledged = 0
        self.num_cut = 0
        """Calls whose connection broke."""
        self._url = url
        self._headers = {"authorization": f"Bearer {admin_key}"}
        self._upload = upload
        self._random = Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=60
        ) as client:
            while not stop.is_set():
                # What was not acknowledged may have happened or not.
                try:
                    await self._write(client)
                except httpx.TransportError:
                    self.num_cut += 1

    async def _write(self, client: httpx.AsyncClient) -> None:
        path = f"/t/acme/v1/adapters/{self.name}"
        # The lower numbers are the tests' own: what they upload has no digest of these.
        reply = await self._upload(client, self.name, 10_000 + self._random.randrange(10_000))
        assert reply.status_code in (200, 201), reply.text
        self.num_acknowledged += 1
        uploaded = reply.json()
        if uploaded["version"] not in self.unsure:
            self.kept[uploaded["version"]] = uploaded["digest"]
        version = self._random.choice(sorted(self.kept))
        move = await client.put(f"{path}/aliases/spare", json={"version": version})
        assert move.status_code == 200, move.text
        self.num_acknowledged += 1
        version = self._random.choice(sorted(self.kept))
        digest = self.kept.pop(version)
        self.unsure.add(version)
        gone = await client.delete(f"{path}/versions/{version}")
        assert gone.status_code in (204, 409), gone.text
        self.num_acknowledged += 1
        self.unsure.remove(version)
        if gone.status_code == 204:
            self.gone.add(version)
        else:
            self.kept[version] = digest

    def check(self, listed: dict[int, str]) -> None:
        """Raise AssertionError unless these digests by version are what must be there."""
        assert self.kept.items() <= listed.items(), "an acknowledged upload is lost"
        assert not self.gone & listed.keys(), "an acknowledged delete is undone"
