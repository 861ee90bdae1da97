"""Backend ``"mosaic_gpu"`` for NVIDIA GPUs: Pallas kernels, compiled through Mosaic GPU.

JAX deprecated Pallas' Triton backend in 0.11. As long as JAX has it, paged_jax prefers ``"triton"``
on GPUs, except for calls for which ``"mosaic_gpu"`` was measured to be at least as fast, see
`paged_jax.kernels.gpu_defaults`. When JAX removes it, ``"mosaic_gpu"`` becomes the default for
GPUs.
"""
