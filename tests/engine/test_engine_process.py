"""The engine as a process: arguments, signals, its parent, its end; with a model and without."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapter_store.digest import hash_files
from engine.client import FetchAdapter
from engine.engine_args import EngineArgs, parse_engine_args
from engine.errors import AdapterUnavailable, ConfigError, EngineUnavailable
from engine.hang_watch import HUNG_EXIT_CODE
from engine.parent import ORPHANED_EXIT_CODE
from engine.transport.zmq_client import ZmqEngineClient
from tests.support.engine_server import ROOT, EngineProcess, engine_process, run_dir
from tests.support.scripted_engine import request
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_adapter, make_tiny_model
from tests.support.waiting import SECONDS, until

pytestmark = pytest.mark.anyio


def document(folder: Path, **changes: object) -> dict[str, object]:
    return {
        "model_dir": str(folder),
        "socket_path": str(folder / "engine.sock"),
        "cache_dir": str(folder / "cache"),
        "generation": 1,
        **changes,
    }


async def _no_fetch(digest: str) -> None:
    raise FileNotFoundError(digest)


@contextlib.asynccontextmanager
async def connect(
    process: EngineProcess, fetch: FetchAdapter = _no_fetch
) -> AsyncIterator[ZmqEngineClient]:
    client = ZmqEngineClient(process.socket_path, fetch, beat_seconds=0.1)
    await client.start()
    try:
        await client.wait_ready(SECONDS)
        yield client
    finally:
        await client.close()


async def wait(process: "subprocess.Popen[bytes]") -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), SECONDS)


def run_engine(stdin: bytes, *argv: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "engine.process", *argv],
        input=stdin, capture_output=True, cwd=ROOT, timeout=SECONDS, check=False,
    )  # fmt: skip


def test_defaults_are_complete_and_consistent(tmp_path: Path) -> None:
    args = parse_engine_args(json.dumps(document(tmp_path)))
    assert args.effective_max_cpu_loras == 32 >= args.max_loras
    assert msgspec.json.decode(msgspec.json.encode(args), type=EngineArgs) == args


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seq": 8}, "max_num_seq"),
        ({"dtype": "float8"}, "dtype"),
        ({"model_dir": "/nowhere"}, "model_dir"),
        ({"socket_path": "/tmp/" + "x" * 100}, "socket_path"),
        ({"socket_path": "engine.sock"}, "socket_path"),
        ({"max_loras": 40, "max_cpu_loras": 8}, "max_cpu_loras"),
    ],
)
def test_arguments_that_cannot_work_name_their_field(
    tmp_path: Path, changes: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        parse_engine_args(json.dumps(document(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"cache_dir": "/proc/cache"}, "cache_dir"),
        ({}, "config.json"),
    ],
    ids=["arguments", "scheduler", "cache", "model"],
)
def test_a_config_error_is_one_line_and_exit_code_two(
    tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    done = run_engine(json.dumps(document(tmp_path, **changes)).encode())
    assert done.returncode == 2
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("engine: ") and names in line


def test_arguments_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(document(tmp_path, max_loras=-1)))
    done = run_engine(b"", str(path))
    assert done.returncode == 2 and b"max_loras" in done.stderr
    done = run_engine(b"", str(tmp_path / "none.json"))
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


async def test_what_was_loaded_at_the_start_is_spared_by_collections() -> None:
    with engine_process() as process:
        process.start("count_frozen")
        async with connect(process) as client:
            stream = await client.generate(request(1, [5], max_tokens=1))
            [output] = [output async for output in stream]
            assert output.deltas[0].token_ids == [1]


async def test_sigterm_ends_an_idle_engine_and_ctrl_c_does_not() -> None:
    with engine_process() as process:
        child = process.start()
        async with connect(process) as client:
            child.send_signal(signal.SIGINT)
            stats = await client.stats()
            assert stats.running == 0
            child.terminate()
            assert await wait(child) == 0


async def test_sigterm_lets_a_stream_finish() -> None:
    with engine_process() as process:
        child = process.start("slow")
        async with connect(process) as client:
            stream = await client.generate(request(1, [5], max_tokens=100))
            await anext(stream)
            child.terminate()
            outputs = [output async for output in stream]
            assert outputs[-1].error_code is None and outputs[-1].finished
            assert await wait(child) == 0


async def test_a_second_sigterm_ends_streams_with_a_last_output() -> None:
    with engine_process() as process:
        child = process.start("slow")
        async with connect(process) as client:
            stream = await client.generate(request(1, [5], max_tokens=2000))
            await anext(stream)
            child.terminate()
            async with asyncio.timeout(SECONDS):
                while client.is_ready:  # its stats call gives the loop its turn
                    await client.stats()
            with pytest.raises(EngineUnavailable):
                await client.generate(request(2, [5]))
            child.terminate()
            assert [output async for output in stream][-1].error_code == "engine_stopped"
            assert await wait(child) == 0


async def test_a_failing_step_ends_streams_with_an_error_and_logs_no_prompt() -> None:
    with engine_process() as process:
        child = process.start("crash")
        async with connect(process) as client:
            prompt = [391, 392, 393]
            stream = await client.generate(request(1, prompt, max_tokens=100))
            assert [output async for output in stream][-1].error_code == "engine_error"
            assert await wait(child) == 1
            log = process.log_path.read_text()
            assert "fell off the bus" in log
            assert "391" not in log and "prompt_token_ids" not in log
            assert all(json.loads(line)["process"] == "engine" for line in log.splitlines())


async def test_a_step_that_hangs_ends_the_process() -> None:
    with engine_process() as process:
        child = process.start("hang", hang_seconds=2.0)
        async with connect(process) as client:
            stream = await client.generate(request(1, [5], max_tokens=100))
            with pytest.raises(EngineUnavailable):
                async for _ in stream:
                    pass
            assert await wait(child) == HUNG_EXIT_CODE
            assert "step_hangs" in process.log_path.read_text()


def test_an_engine_whose_parent_is_gone_already_ends() -> None:
    with engine_process() as process:
        child = process.start(parent_pid=2**22 - 1)
        assert child.wait(SECONDS) == ORPHANED_EXIT_CODE


def test_an_engine_dies_with_its_parent() -> None:
    parent_code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tests.support.engine_server', "
        "sys.argv[1], 'echo'], stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with run_dir() as folder:
        path = folder / "args.json"
        path.write_text(json.dumps(document(folder)))
        parent = subprocess.Popen(
            [sys.executable, "-c", parent_code, str(path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            until((folder / "engine.sock").exists)
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        until(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


class AdapterFolder:
    """Fetches one adapter, damaged at first, and no other."""

    def __init__(self, source: Path, cache_dir: Path) -> None:
        weights = source / "adapter_model.safetensors"
        self.digest = hash_files((source / "adapter_config.json").read_bytes(), weights)
        self.num_fetches = 0
        self._source = source
        self._cache_dir = cache_dir

    async def fetch(self, digest: str) -> None:
        if digest != self.digest:
            raise FileNotFoundError("no such blob")
        self.num_fetches += 1
        target = self._cache_dir / digest
        await asyncio.to_thread(shutil.copytree, self._source, target)
        if self.num_fetches == 1:
            weights = target / "adapter_model.safetensors"
            damaged = bytearray(weights.read_bytes())
            damaged[-1] ^= 1
            weights.write_bytes(damaged)


async def ask(client: ZmqEngineClient, adapter: str | None = None) -> list[int]:
    number = client.next_request_id()
    stream = await client.generate(request(number, [5, 6, 7], adapter=adapter, max_tokens=8))
    outputs = [output async for output in stream]
    if outputs[-1].error_code is not None:
        raise AdapterUnavailable(adapter or "", outputs[-1].error_code)
    return [t for output in outputs for d in output.deltas for t in d.token_ids]


async def test_a_real_model_and_a_real_adapter_are_served_by_the_process(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    source = make_tiny_adapter(tmp_path / "adapter", model_dir, strength=2.0)
    with engine_process() as process:
        child = process.start(None, model_dir=str(model_dir), num_kv_blocks=64, num_threads=1)
        adapter = AdapterFolder(source, process.folder / "cache")
        async with connect(process, adapter.fetch) as client:
            info = client.info
            assert info.eos_token_ids == [EOS_TOKEN_ID] and info.num_kv_blocks == 64
            assert info.max_model_len == 512 and info.model == "tiny"
            base, *others = await asyncio.gather(*(ask(client) for _ in range(4)))
            assert 1 <= len(base) <= 8 and all(other == base for other in others)
            adapted, again = await asyncio.gather(ask(client, adapter.digest), ask(client))
            assert adapted != base == again
            assert adapter.num_fetches == 2  # the damaged files were noticed and asked for again
            stats = await client.stats()
            assert stats.resident == [adapter.digest] and stats.host_adapter_bytes > 0
            with pytest.raises(AdapterUnavailable, match="adapter_unavailable"):
                await ask(client, "f" * 64)
            child.terminate()
            assert await wait(child) == 0
