"""The registry's calls about logins to the dashboard: each a transaction of its own."""

from collections.abc import Sequence
from datetime import datetime

from adapter_store.registry import logins
from adapter_store.registry.logins import Login
from adapter_store.registry.transactions import Transactions


class LoginCalls(Transactions):
    """Part of `Registry`. None of them is answered from memory."""

    async def log_in(
        self, token_hash: str, *, key_hash: str, key_id: str | None, expires_at: datetime
    ) -> None:
        """Begin a session under the hash of its token; raises `KeyNotFound`.

        `key_id` None is the admin key of the settings.
        """
        now = self._clock()
        await self._database.write(
            lambda s: logins.create(s, token_hash, key_hash, key_id, now, expires_at)
        )

    async def find_logins(self, token_hashes: Sequence[str]) -> dict[str, Login]:
        """The sessions that there are, by the hash of their token, whatever became of their key."""
        return await self._database.read(lambda s: logins.find(s, token_hashes))

    async def log_out(self, token_hash: str) -> None:
        """End a session; harmless a second time."""
        await self._database.write(lambda s: logins.end(s, token_hash))

    async def purge_logins(self) -> None:
        """Drop the sessions whose time is over."""
        now = self._clock()
        await self._database.write(lambda s: logins.purge(s, now))
