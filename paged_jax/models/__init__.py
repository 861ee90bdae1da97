"""Models that read and write a paged cache, how their weights are loaded, and their text."""
