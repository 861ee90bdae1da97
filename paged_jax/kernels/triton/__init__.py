"""Backend ``"triton"`` for NVIDIA GPUs: Pallas kernels, compiled through Triton.

JAX deprecated Pallas' Triton backend in 0.11. If JAX does not have it, this backend supports no
problem, and other backends run the ops.
"""
