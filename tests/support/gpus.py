"""Descriptions of GPUs for XLA to compile for."""

from typing import NamedTuple

from paged_jax.kernels.gpu_device import GpuInfo


class Gpu(NamedTuple):
    """Description of a GPU for XLA.

    Limits come from the CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability". The other figures come from NVIDIA's white papers and data sheets.

    Attributes:
      device: the device for which kernels choose their launch parameters.
      shared_memory: bytes per SM; a thread block may use 1 KB less.
      threads: number of threads per SM.
      l2_cache: bytes.
      memory: bytes.
      bandwidth: bytes per second.
    """

    device: GpuInfo
    shared_memory: int
    threads: int
    l2_cache: int
    memory: int
    bandwidth: int

    @property
    def target_config(self) -> str:
        """Return the description that XLA reads (xla/stream_executor/device_description.proto).

        XLA requires the version of a cuDNN, which these programs do not use.
        """
        kind, num_cores, (major, minor) = self.device
        return f"""
            platform_name: "CUDA"
            device_description_str: "{kind}"
            dnn_version_info {{ major: 9 minor: 12 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {num_cores}
              fpus_per_core: 128
              clock_rate_ghz: 1.98
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: {self.threads}
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.block_memory}
              shared_memory_per_core: {self.shared_memory}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              l2_cache_size: {self.l2_cache}
              memory_bandwidth: {self.bandwidth}
              device_memory_size: {self.memory}
            }}
        """

    @property
    def block_memory(self) -> int:
        """Maximum bytes of shared memory of a thread block."""
        return self.shared_memory - 1024


_KB, _MB, _GB = 2**10, 2**20, 10**9

GPUS = {
    "t4": Gpu(GpuInfo("Tesla T4", 40, (7, 5)), 64 * _KB, 1024, 4 * _MB, 16 * _GB, 320 * _GB),
    "a100": Gpu(
        GpuInfo("NVIDIA A100", 108, (8, 0)), 164 * _KB, 2048, 40 * _MB, 80 * _GB, 2039 * _GB
    ),
    "a10": Gpu(GpuInfo("NVIDIA A10", 72, (8, 6)), 100 * _KB, 1536, 6 * _MB, 24 * _GB, 600 * _GB),
    "l4": Gpu(GpuInfo("NVIDIA L4", 58, (8, 9)), 100 * _KB, 1536, 48 * _MB, 24 * _GB, 300 * _GB),
    "h200": Gpu(
        GpuInfo("NVIDIA H200", 132, (9, 0)), 228 * _KB, 2048, 50 * _MB, 141 * _GB, 4800 * _GB
    ),
    "b200": Gpu(
        GpuInfo("NVIDIA B200", 148, (10, 0)), 228 * _KB, 2048, 126 * _MB, 180 * _GB, 8000 * _GB
    ),
    "rtx-pro-6000": Gpu(
        GpuInfo("NVIDIA RTX PRO 6000", 188, (12, 0)), 100 * _KB, 1536, 128 * _MB, 96 * _GB,
        1792 * _GB,
    ),
}  # fmt: skip
