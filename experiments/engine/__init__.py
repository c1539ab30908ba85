"""The training engine of the experiments: `train_and_evaluate` runs a task in a work dir, and goes on where it was."""
