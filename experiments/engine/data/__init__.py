"""Data sets: found, prepared once, read by index, and made into examples."""
