import pytest

from tests.support.poisoned_memory import poison_empty


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch of every kernel, in every test of this folder."""
    poison_empty(monkeypatch)
