"""What several benchmarks share: machine, device time, shapes, goals, peers and plots."""
