"""Data sets: they are found or downloaded, prepared once, read by index, and made into examples."""
