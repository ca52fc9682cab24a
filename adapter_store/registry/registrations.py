"""Registrations by reference: what was asked for, how far it is, and how it ended.

The work is done by one process, which is the row's `owner` and says now and then that it lives. A
row that it leaves unfinished is failed by whoever finds it: its successor at once, others later.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from adapter_store.errors import InvalidField, RegistrationNotFound, TooManyRegistrations
from adapter_store.registry import tenants
from adapter_store.registry.models import Registration, Tenant
from adapter_store.registry.session import Database

State = Literal["queued", "fetching", "checking", "ready", "failed"]

INTERRUPTED = "interrupted"
_UNFINISHED: tuple[State, ...] = ("queued", "fetching", "checking")
_MAX_MESSAGE = 512
_ID = re.compile(r"reg_[0-9a-f]{16}")
_DEAD_AFTER = timedelta(seconds=60)
_KEPT_FOR = timedelta(days=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationInfo:
    """A registration by reference: `ready` ones have a `version`, `failed` ones an `error_code`."""

    registration_id: str
    name: str
    source: str
    """With the commit in place of a branch, once that is known."""
    state: State
    received_bytes: int
    total_bytes: int | None
    version: int | None
    digest: str | None
    is_new: bool | None
    error_code: str | None
    error_message: str | None
    error_field: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Outcome:
    """The version that a registration became; `is_new` is False if it was there already."""

    source: str
    version: int
    digest: str
    is_new: bool


class Registrations:
    """Registrations of all tenants, by one owner. Any call may raise `RegistryUnavailable`."""

    def __init__(self, database: Database, owner: str, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._owner = owner
        self._clock = clock
        self._began_at = clock()

    async def create(
        self, tenant: str, name: str, source: str, *, max_unfinished: int
    ) -> RegistrationInfo:
        """Raises `TenantNotFound`, or `TooManyRegistrations` where so many are under way."""

        async def work(session: AsyncSession) -> RegistrationInfo:
            owner = await tenants.find(session, tenant, lock="keep")
            unfinished = await session.scalar(
                select(func.count())
                .select_from(Registration)
                .where(Registration.tenant_id == owner.id, Registration.state.in_(_UNFINISHED))
            )
            if (unfinished or 0) >= max_unfinished:
                raise TooManyRegistrations(
                    f"{unfinished} registrations are under way; wait until one has ended"
                )
            now = self._clock()
            row = Registration(
                registration_id=f"reg_{secrets.token_hex(8)}",
                tenant_id=owner.id,
                name=name,
                source=source,
                state="queued",
                received_bytes=0,
                owner=self._owner,
                created_at=now,
                updated_at=now,
            )
            session.add(row)
            await session.flush()
            return _info(row)

        return await self._database.write(work)

    async def get(self, tenant: str, registration_id: str) -> RegistrationInfo:
        """Raises `RegistrationNotFound`."""
        query = _of_tenant(tenant).where(Registration.registration_id == registration_id)
        is_id = _ID.fullmatch(registration_id) is not None  # databases refuse some other texts
        row = await self._database.read(lambda s: s.scalar(query)) if is_id else None
        if row is None:
            raise RegistrationNotFound("there is no such registration")
        return _info(row)

    async def newest(
        self, tenant: str, limit: int | None = None, after: str = ""
    ) -> list[RegistrationInfo]:
        """A tenant's registrations, newest first: all, or the first `limit` after one's id.

        Raises `InvalidField` (after).
        """

        async def work(session: AsyncSession) -> list[RegistrationInfo]:
            query = _of_tenant(tenant).order_by(Registration.id.desc()).limit(limit)
            if after:
                is_id = _ID.fullmatch(after) is not None
                last = _of_tenant(tenant).where(Registration.registration_id == after)
                if (row := await session.scalar(last) if is_id else None) is None:
                    raise InvalidField(
                        "after", "`after` must be the last registration's id of the page before"
                    )
                query = query.where(Registration.id < row.id)
            return [_info(row) for row in await session.scalars(query)]

        return await self._database.read(work)

    async def note(
        self, registration_id: str, state: State, received_bytes: int, total_bytes: int | None
    ) -> None:
        """Say how far an unfinished one is, and that its owner lives."""
        await self._update(
            registration_id, state=state, received_bytes=received_bytes, total_bytes=total_bytes
        )

    async def succeed(self, registration_id: str, outcome: Outcome) -> None:
        """End one with the version that it became."""
        await self._update(
            registration_id, state="ready", source=outcome.source, version=outcome.version,
            digest=outcome.digest, is_new=outcome.is_new,
        )  # fmt: skip

    async def fail(
        self, registration_id: str, code: str, message: str, field: str | None = None
    ) -> None:
        """End one with a reason code."""
        await self._update(registration_id, **_failure(code, message, field))

    async def fail_interrupted(self, *, own: bool = False) -> None:
        """Fail those whose owner has been silent for a minute.

        With `own`, which is for a process that has just started, also what this owner's former
        process left unfinished: its work is lost.
        """
        is_dead = Registration.updated_at < self._clock() - _DEAD_AFTER
        if own:
            is_former = Registration.created_at <= self._began_at
            is_dead = or_(is_dead, and_(Registration.owner == self._owner, is_former))
        message = "the service stopped before the adapter was registered; ask again"
        query = (
            update(Registration)
            .where(Registration.state.in_(_UNFINISHED), is_dead)
            .values(updated_at=self._clock(), **_failure(INTERRUPTED, message, None))
        )
        await self._database.write(lambda s: s.execute(query))

    async def purge(self) -> None:
        """Forget those that ended more than a week ago."""
        query = delete(Registration).where(
            Registration.state.not_in(_UNFINISHED),
            Registration.updated_at < self._clock() - _KEPT_FOR,
        )
        await self._database.write(lambda s: s.execute(query))

    async def _update(self, registration_id: str, **values: Any) -> None:
        # What has ended stays as it is: it may have been failed for a silence.
        query = (
            update(Registration)
            .where(
                Registration.registration_id == registration_id,
                Registration.state.in_(_UNFINISHED),
            )
            .values(updated_at=self._clock(), **values)
        )
        await self._database.write(lambda s: s.execute(query))


def _of_tenant(tenant: str) -> Any:
    return (
        select(Registration)
        .join(Tenant, Tenant.id == Registration.tenant_id)
        .where(Tenant.name == tenant)
    )


def _failure(code: str, message: str, field: str | None) -> dict[str, Any]:
    return {
        "state": "failed",
        "error_code": code[:64],
        "error_message": message[:_MAX_MESSAGE],
        "error_field": None if field is None else field[:255],
    }


def _info(row: Registration) -> RegistrationInfo:
    return RegistrationInfo(
        registration_id=row.registration_id, name=row.name, source=row.source,
        state=row.state,  # pyright: ignore[reportArgumentType]
        received_bytes=row.received_bytes, total_bytes=row.total_bytes, version=row.version,
        digest=row.digest, is_new=row.is_new, error_code=row.error_code,
        error_message=row.error_message, error_field=row.error_field, created_at=row.created_at,
        updated_at=row.updated_at,
    )  # fmt: skip
