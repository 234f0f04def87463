"""What every test gets."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples on every machine, and no failure because a machine is slow.
settings.register_profile("book", deadline=None, derandomize=True, database=None)
settings.load_profile("book")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Numbers that a test draws without a generator are the same in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: a second thread costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
