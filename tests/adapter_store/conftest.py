"""A tiny base model, and an adapter for it that each test may damage."""

from pathlib import Path

import pytest

from adapter_store.base_model import BaseModel, read_base_model
from tests.support.adapter_files import copy_adapter
from tests.support.tiny_models import make_tiny_adapter, make_tiny_model


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny-llama"
    return make_tiny_model(folder, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture(scope="session")
def base(base_dir: Path) -> BaseModel:
    return read_base_model(base_dir)


@pytest.fixture(scope="session")
def saved_adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_adapter(tmp_path_factory.mktemp("adapter") / "plain", base_dir, r=4)


@pytest.fixture
def adapter(saved_adapter: Path, tmp_path: Path) -> Path:
    return copy_adapter(saved_adapter, tmp_path / "adapter")
