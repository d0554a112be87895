"""Fixtures that all tests share."""

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from tests.helpers.pool import PRELOAD, Pool

# Whoever starts the first rank of this process starts the fork server, with what it has been told until then.
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The warm ranks of this run, started by the first job."""
    with Pool() as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
