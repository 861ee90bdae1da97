"""Measurements on a GPU within half an hour, in stages that can run separately."""
