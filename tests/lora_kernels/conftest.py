import pytest
import torch

from tests.support.lora_cases import has_native_kernel
from tests.support.poisoned_memory import poison_empty

# Without a C++ compiler there is no compiled kernel, and adapters run through PyTorch.
collect_ignore = [] if has_native_kernel() else ["test_cpu_native.py"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that nobody wrote reads as NaN; the list grows with each such allocation."""
    return poison_empty(monkeypatch)
