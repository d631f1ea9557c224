"""What the kernel tests share."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked_types():
    """Without run-time shape checks: a test of the library's own refusals must get past them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
