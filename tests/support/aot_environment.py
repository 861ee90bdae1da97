"""The settings that libtpu must find in the environment when it is imported to compile for TPUs."""

import os


def set_for_tpus() -> None:
    """Let JAX describe TPUs and compile for them; to be called before JAX is imported."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        # A described chip cannot load what a cache holds.
        JAX_ENABLE_COMPILATION_CACHE="false",
        # libtpu otherwise asks the cloud's metadata server which chips it has.
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        TPU_MIN_LOG_LEVEL="3",
        TPU_STDERR_LOG_LEVEL="3",
        # Two programs may compile at once; chips could not be shared so.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
