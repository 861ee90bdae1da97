"""Backend for CPUs: C++ kernels that are compiled on the machine that runs them.

XLA's CPU backend has no matmul that takes rows by index, so it copies K and V of each tile out of
the pool. If it multiplies few rows by bfloat16 weights, it reads the weights at a third of the
memory's speed. The kernels in `native` read both the pool and the weights in place. They run on
XLA's own threads, through its foreign function interface (FFI).

Each call of a kernel (`native.library.call`) has an equivalent function in plain JAX. The function
replaces the kernel if the kernel cannot be compiled, on other platforms, in exported programs, and
in programs that XLA partitions over devices.
"""
