"""Experiments: `python -m experiments.<name>`."""
