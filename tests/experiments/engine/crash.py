"""Trains the toy and dies by SIGKILL, at each of some moments: `python -m tests.experiments.engine.crash WORKDIR`.

Each moment has a process and a directory of its own. They are forked before JAX is at work, to import it once.
"""

import os
import shutil
import signal
import sys

from experiments.engine.progress import Progress
from experiments.engine.run import train_and_evaluate
from tests.experiments.engine.toy import ToyTask, toy_config

DEADLY_STEP = 7  # after the checkpoints of steps 3, 4 and 6


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step():
    """Between the steps: one of them is still at work, and the save of step 6 may be."""
    update = Progress.update

    def deadly(self, done, loss):
        if done == DEADLY_STEP:
            die()
        update(self, done, loss)

    Progress.update = deadly


def die_before_writing():
    """When the temporary directory of step 6 is there, and empty."""
    mkdir = os.mkdir

    def deadly(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        if os.path.basename(path).startswith("6.orbax"):
            die()

    os.mkdir = deadly


def die_before_renaming():
    """When all of step 6 is written, and not yet in its place."""
    rename = os.rename

    def deadly(path, *args, **kwargs):
        if os.path.basename(path).startswith("6.orbax"):
            die()
        return rename(path, *args, **kwargs)

    os.rename = deadly


def die_in_deletion():
    """When step 3 is deleted in part, after step 4 was saved."""
    rmtree = shutil.rmtree

    def deadly(path, *args, **kwargs):
        if os.path.basename(path) == "3":
            rmtree(os.path.join(path, "variables"))
            die()
        return rmtree(path, *args, **kwargs)

    shutil.rmtree = deadly


MOMENTS = {
    "step": die_in_step,
    "start of a save": die_before_writing,
    "end of a save": die_before_renaming,
    "deletion": die_in_deletion,
}

if __name__ == "__main__":
    for moment, prepare in MOMENTS.items():
        child = os.fork()
        if not child:
            prepare()
            train_and_evaluate(toy_config(ToyTask(noise=0.1)), os.path.join(sys.argv[1], moment))
            os._exit(0)
        print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=": ", flush=True)
