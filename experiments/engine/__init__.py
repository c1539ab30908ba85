"""The code that the experiments share: training with checkpoints, data sets, models, reports and command lines.

`run.train_and_evaluate` runs a task in a work directory, and continues an interrupted run.
"""
