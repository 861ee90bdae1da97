"""C++ kernels for CPUs: sources, compilation, cache, self-tests, and calls with a plain meaning."""
