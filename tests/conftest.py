"""What all tests share."""

import pytest

pytest_plugins = "pytester"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
