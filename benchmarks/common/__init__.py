"""Rates and times of a device, and model shapes, for all benchmarks."""
