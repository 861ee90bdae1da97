"""Simulation of the division of a batch among program instances of the decode kernel on a GPU."""
