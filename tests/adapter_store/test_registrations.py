from datetime import timedelta

import pytest

from adapter_store.errors import (
    InvalidField,
    RegistrationNotFound,
    TenantNotFound,
    TooManyRegistrations,
)
from adapter_store.registry.registrations import Outcome, Registrations
from adapter_store.registry.registry import Registry
from adapter_store.registry.session import Database
from tests.support.registry import FakeClock

pytestmark = pytest.mark.anyio

SOURCE = "hf://org/name@main"


class Fixture:
    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        self.registry = Registry(Database(url), clock=lambda: self.clock.now)
        self.one = self.owned_by("one")

    def owned_by(self, owner: str) -> Registrations:
        return Registrations(self.registry.database, owner, lambda: self.clock.now)

    async def create(self, of: Registrations | None = None) -> str:
        created = await (of or self.one).create("acme", "a", SOURCE, max_unfinished=3)
        return created.registration_id


@pytest.fixture
async def jobs(registry_url: str):
    fixture = Fixture(registry_url)
    for tenant in ("acme", "zen"):
        await fixture.registry.create_tenant(tenant)
    yield fixture
    await fixture.registry.close()


async def test_a_registration_is_followed_to_its_version_by_its_tenant_alone(jobs: Fixture):
    with pytest.raises(TenantNotFound):
        await jobs.one.create("nobody", "a", SOURCE, max_unfinished=3)
    job = await jobs.create()
    first = await jobs.one.get("acme", job)
    assert (first.state, first.source, first.received_bytes) == ("queued", SOURCE, 0)
    await jobs.one.note(job, "fetching", 5, 10)
    seen = await jobs.one.get("acme", job)
    assert (seen.state, seen.received_bytes, seen.total_bytes) == ("fetching", 5, 10)
    await jobs.one.succeed(job, Outcome("hf://org/name@abc", 3, "d" * 64, True))
    ready = await jobs.one.get("acme", job)
    assert (ready.state, ready.version, ready.is_new) == ("ready", 3, True)
    assert ready.source == "hf://org/name@abc"
    for other in ("reg_0", "x" * 5000, "reg_0000000000000000", f"{job}\0"):
        with pytest.raises(RegistrationNotFound):
            await jobs.one.get("acme", other)
    with pytest.raises(RegistrationNotFound):
        await jobs.one.get("zen", job)
    assert await jobs.one.newest("zen") == []
    assert [found.registration_id for found in await jobs.one.newest("acme")] == [job]


async def test_registrations_are_listed_in_pages_newest_first(jobs: Fixture):
    made = [await jobs.create() for _ in range(3)]
    listed: list[str] = []
    while page := await jobs.one.newest("acme", 2, listed[-1] if listed else ""):
        assert len(page) <= 2
        listed += [found.registration_id for found in page]
    assert listed == made[::-1]
    for tenant, after in [("zen", made[0]), ("acme", "reg_0000000000000000"), ("acme", "\0")]:
        with pytest.raises(InvalidField) as caught:
            await jobs.one.newest(tenant, 2, after)
        assert caught.value.field == "after"


async def test_what_has_ended_is_not_changed_any_more(jobs: Fixture):
    job = await jobs.create()
    await jobs.one.fail(job, "source_not_found", "m" * 1000, "source")
    await jobs.one.note(job, "fetching", 1, None)
    await jobs.one.succeed(job, Outcome(SOURCE, 1, "d" * 64, True))
    found = await jobs.one.get("acme", job)
    assert (found.state, found.error_code, found.error_field) == (
        "failed", "source_not_found", "source",
    )  # fmt: skip
    assert found.error_message == "m" * 512


async def test_a_tenant_has_so_many_under_way_and_no_more(jobs: Fixture):
    first, *_ = [await jobs.create() for _ in range(3)]
    with pytest.raises(TooManyRegistrations):
        await jobs.create()
    await jobs.one.create("zen", "a", SOURCE, max_unfinished=3)
    await jobs.one.fail(first, "x", "y")
    await jobs.create()


async def test_a_restart_fails_what_its_predecessor_left_and_a_silence_fails_the_rest(
    jobs: Fixture,
):
    other = jobs.owned_by("two")
    mine, theirs = await jobs.create(), await jobs.create(other)
    await jobs.one.fail_interrupted()
    assert (await jobs.one.get("acme", mine)).state == "queued"
    successor = jobs.owned_by("one")
    jobs.clock.advance(1)
    new = await jobs.create(successor)  # before its first look at what was left
    await successor.fail_interrupted(own=True)
    assert (await jobs.one.get("acme", new)).state == "queued"
    found = await jobs.one.get("acme", mine)
    assert (found.state, found.error_code) == ("failed", "interrupted")
    assert (await jobs.one.get("acme", theirs)).state == "queued"

    jobs.clock.advance(50)
    await other.note(theirs, "fetching", 0, None)  # a sign of life
    jobs.clock.advance(50)
    await jobs.one.fail_interrupted()
    assert (await jobs.one.get("acme", theirs)).state == "fetching"
    jobs.clock.advance(11)
    await jobs.one.fail_interrupted()
    assert (await jobs.one.get("acme", theirs)).error_code == "interrupted"


async def test_ended_registrations_are_forgotten_after_a_week_and_with_their_tenant(jobs: Fixture):
    ended, running = await jobs.create(), await jobs.create()
    await jobs.one.fail(ended, "x", "y")
    jobs.clock.advance(timedelta(days=8).total_seconds())
    await jobs.one.purge()
    assert [found.registration_id for found in await jobs.one.newest("acme")] == [running]
    await jobs.registry.delete_tenant("acme")
    assert await jobs.one.newest("acme") == []
