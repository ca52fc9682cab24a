from collections.abc import Callable

import pytest
import torch

from tests.support.lora_cases import has_native_kernel

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
    calls: list[int] = []

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            calls.append(1)
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    for name in ("new_empty",):
        monkeypatch.setattr(torch.Tensor, name, poison(getattr(torch.Tensor, name)))
    return calls
