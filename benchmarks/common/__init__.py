"""Shared parts of benchmarks: machine, device time, shapes, goals, peers and plots."""
