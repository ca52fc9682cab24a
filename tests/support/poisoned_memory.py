"""Memory that nobody wrote, made to be seen by whoever reads it."""

from collections.abc import Callable

import pytest
import torch

_MOST_ELEMENTS = 2**24
"""Larger tensors are sparse: filling them would take the memory that they do not have."""


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tensors without values read as NaN, or -1; the list grows with each of them."""
    calls: list[int] = []

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            calls.append(1)
            tensor = make(*args, **kwargs)
            if tensor.numel() > _MOST_ELEMENTS:
                return tensor
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    for name in ("new_empty",):
        monkeypatch.setattr(torch.Tensor, name, poison(getattr(torch.Tensor, name)))
    return calls
