# pyright: strict
"""Facts about platforms that an engine depends on: their memory, XLA's compilers, and calls.

Each function answers one question about a platform, which is `jax.Device.platform` of a device:
``"cpu"``, ``"gpu"`` or ``"tpu"``. `runner.compiler` has the options of the compilers.
"""

# Fraction of a GPU's memory that JAX takes in a server, which needs the GPU for itself. The rest is
# for CUDA and its libraries. JAX's own default is 0.75, see `command_line.take_gpu_memory`.
GPU_SHARE = 0.9


# Memory


def uses_host_memory(platform: str) -> bool:
    """Return whether arrays are in the memory of the host, which other programs use too.

    JAX does not report how much of this memory is in use.
    """
    return platform == "cpu"


def server_memory_share(platform: str) -> float:
    """Return the fraction of a device's memory that JAX takes in a server."""
    return GPU_SHARE if platform == "gpu" else 1.0


# Compilers


def keeps_layer_outputs(platform: str) -> bool:
    """Return whether a program holds the outputs of all layers, because XLA adds them at the end.

    Otherwise the number of residual-stream arrays does not depend on the number of layers.
    """
    return platform == "cpu"


def copies_expert_weights(platform: str) -> bool:
    """Return whether a program may hold float32 copies of the gate and up weights of an expert."""
    return platform == "cpu"


def compiles_on_device(platform: str) -> bool:
    """Return whether XLA needs memory of the device to compile.

    For GPUs, it measures matrix multiplications on copies of their operands.
    """
    return platform == "gpu"


def can_store_executables(platform: str) -> bool:
    """Return whether executables are written to files, to skip tracing in the next process."""
    return platform == "cpu"


# Calls


def waits_for_loops(platform: str) -> bool:
    """Return whether the call of a program with a loop returns only after the loop has ended.

    For GPUs, the host reads the condition of the loop after each iteration.
    """
    return platform == "gpu"


def gains_from_cascade(platform: str) -> bool:
    """Return whether cascade attention was measured to be faster, if sequences share blocks."""
    return platform == "cpu"
