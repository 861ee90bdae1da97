"""An H200, as XLA wants to be told of one that is not there."""

# A GPU as XLA describes it (xla/stream_executor/device_description.proto). The limits are those of
# compute capability 9.0 in the CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability": 227 of 228 KB of shared memory a multiprocessor are for one block that asks for them.
# 132 multiprocessors and 50 MB of L2 cache are the H100 SXM's in NVIDIA's white paper on the Hopper
# architecture, which the H200 keeps; 141 GB of memory at 4.8 TB/s are from the H200's data sheet.
# XLA wants to know of a cuDNN too, which nothing here uses.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 141000000000
}
"""
