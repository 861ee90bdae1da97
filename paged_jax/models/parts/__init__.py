"""Parts of decoder layers, such as attention, experts and recurrences."""
