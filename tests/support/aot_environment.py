"""Environment variables that libtpu needs at import to compile for TPUs."""

import os


def set_for_tpus() -> None:
    """Let JAX describe TPUs and compile for them. Call this before importing JAX."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        # A described chip cannot load cached programs.
        JAX_ENABLE_COMPILATION_CACHE="false",
        # Otherwise libtpu queries the metadata server of the cloud for its chips.
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_MIN_LOG_LEVEL="3",
        TPU_STDERR_LOG_LEVEL="3",
        # Two programs may compile at the same time, although they could not share chips.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
