import contextlib
import secrets

import pytest

from shmbuf import destroy
from shmbuf.errors import BufferNotFound


@pytest.fixture
def unique_name():
    name = f"process-test.{secrets.token_hex(6)}"
    yield name
    with contextlib.suppress(BufferNotFound):
        destroy(name, force=True)
