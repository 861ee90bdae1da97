"""Kernels for GPUs and TPUs are interpreted where there are none, and compile in less time here."""

from collections.abc import Generator

import jax
import pytest

_BACKENDS = {"triton", "mosaic_tpu"}
_FILES = ("test_triton_", "test_mosaic_tpu")


@pytest.fixture(autouse=True)
def unoptimised_interpretation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Generator[None]:
    """Compile what interprets a kernel without the expensive passes of LLVM.

    The machine code of an interpretation is for tests alone, and optimising it takes a third of
    their time. Kernels that run on the device that they are for stay as they are, and so do
    backends of XLA.
    """
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    names = {value for value in params.values() if isinstance(value, str)}
    is_kernel = request.node.path.name.startswith(_FILES) or bool(names & _BACKENDS)
    if jax.default_backend() != "cpu" or not is_kernel:
        yield
        return
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for processes that a test starts
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
