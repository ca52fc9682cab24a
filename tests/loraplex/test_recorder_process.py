"""The recorder beside a real engine's socket: what it asks, and what it leaves in the database."""

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select

from adapter_store.registry.registry import Registry
from adapter_store.registry.rollup_models import EngineRollup, TrafficRollup, TrafficSubject
from engine.errors import EngineUnavailable
from engine.messages import Generate
from engine.refusal_notes import NoteRefusals, Refusals
from engine.telemetry.records import Cursor
from loraplex.recorder.engine_reader import EngineReader
from loraplex.recorder.process import RecorderArgs, record
from loraplex.recorder.widths import QUARTER
from tests.support.engine_server import ServerThread, run_dir, server_thread
from tests.support.registry import database_url, open_registry
from tests.support.scripted_engine import EOS, ScriptedRunner, request
from tests.support.waiting import SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with server_thread(ScriptedRunner(lambda prompt, adapter: [5, 6, EOS])) as running:
        yield running


def ask(server: ServerThread, count: int, first: int = 1) -> None:
    """Requests of `acme` for the base, to their ends."""
    client = server.joined_client()
    for number in range(first, first + count):
        client.send(Generate(request(number, [1, 2, 3])))
        client.receive_last(number)


async def test_a_reader_is_answered_and_is_no_client(server: ServerThread):
    await asyncio.to_thread(ask, server, 3)
    async with EngineReader(server.socket_path) as reader:
        answer = await reader.telemetry(Cursor(), with_totals=True)
        assert [record.finish_reason for record in answer.requests] == ["stop"] * 3
        assert answer.totals is not None and answer.generation == 1
        assert (await reader.telemetry(answer.cursor)).requests == []
        assert (await reader.stats()).steps >= 9
    assert len(server.server._peers) <= 1  # it gets no adapters to fetch, no calls to settle


async def test_a_reader_of_no_engine_says_so():
    with run_dir() as folder:
        async with EngineReader(folder / "engine.sock", answer_seconds=0.2) as reader:
            with pytest.raises(EngineUnavailable):
                await reader.stats()


@asynccontextmanager
async def recording(args: RecorderArgs):
    stop = asyncio.Event()
    task = asyncio.create_task(record(args, stop))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(SECONDS):
            await task


async def counted(registry: Registry) -> int:
    """Requests of the service that were written."""
    found = await registry.database.read(
        lambda s: s.scalar(
            select(func.sum(TrafficRollup.requests))
            .join(TrafficSubject)
            .where(TrafficSubject.tenant == "", TrafficRollup.width == QUARTER)
        )
    )
    return int(found or 0)


async def test_what_was_done_until_the_stop_is_written_and_the_next_recorder_goes_on(
    tmp_path: Path, server: ServerThread
):
    async with open_registry(tmp_path) as registry:
        args = RecorderArgs(
            database_url=database_url(tmp_path), engine_socket=str(server.socket_path), run="one"
        )
        async with recording(args):
            await asyncio.to_thread(ask, server, 4)
        assert await counted(registry) == 4
        await asyncio.to_thread(ask, server, 3)
        async with recording(args):
            pass
        assert await counted(registry) == 7
        covered = await registry.database.read(
            lambda s: s.scalar(
                select(func.sum(EngineRollup.covered)).where(EngineRollup.width == QUARTER)
            )
        )
        assert covered > 0


async def test_what_was_refused_until_the_stop_is_written(tmp_path: Path, server: ServerThread):
    def refuse() -> None:
        client = server.joined_client()
        client.send(NoteRefusals([Refusals("acme", None, "request_rate_exceeded", 2)]))
        client.stats()  # answered after the note was taken

    async with open_registry(tmp_path) as registry:
        args = RecorderArgs(
            database_url=database_url(tmp_path), engine_socket=str(server.socket_path), run="one"
        )
        async with recording(args):
            await asyncio.to_thread(ask, server, 1)
            async with asyncio.timeout(SECONDS):
                while not await counted(registry):  # noqa: ASYNC110 - nothing tells when
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(refuse)  # the sums were just asked for
        refused = await registry.database.read(
            lambda s: s.scalars(
                select(TrafficRollup.refused)
                .join(TrafficSubject)
                .where(
                    TrafficSubject.tenant == "acme", TrafficSubject.adapter == "",
                    TrafficRollup.width == QUARTER,
                )
            )
        )  # fmt: skip
        assert [codes for codes in refused if codes] == [{"request_rate_exceeded": 2}]


async def test_a_stop_does_not_wait_for_an_engine_that_is_not_there(tmp_path: Path):
    async with open_registry(tmp_path), asyncio.timeout(SECONDS):
        args = RecorderArgs(
            database_url=database_url(tmp_path), engine_socket=str(tmp_path / "none"), run="one"
        )
        async with recording(args):
            await asyncio.sleep(0.05)
