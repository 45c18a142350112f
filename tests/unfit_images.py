"""Opens systems whose images are said to be unfit; as a script, runs an experiment so: ``unfit_images.py FILE.yaml FOLDER``."""

import contextlib
import sys

from penstock.driver.opening import open_system
from penstock.experiments import read_experiment, run_experiment
from penstock.experiments import run as run_module
from penstock.solvers.image_solve import ImageUnfitError


@contextlib.contextmanager
def open_unfit(*given, **options):
    """Open a system, and find its image unfit once that is there."""
    with open_system(*given, **options) as system:
        if system.streamed is not None:
            raise ImageUnfitError("it is too coarse")
        yield system


if __name__ == "__main__":
    run_module.open_system = open_unfit
    run_experiment(read_experiment(sys.argv[1]), sys.argv[2])
