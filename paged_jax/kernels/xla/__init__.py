"""The plain meaning of the ops, in JAX, which XLA compiles for every platform.

Calls that no kernel supports run it. CPUs and TPUs also use its writes and copies of blocks.
"""
