"""Start the benchmark: ``python benchmarks/zoo cpu2``."""

import sys
from pathlib import Path

# The folder of all benchmarks takes the place of this one: `zoo` is a package in it, and has files of the same names.
sys.path[0] = str(Path(__file__).parents[1])

from zoo.run import main  # noqa: E402

if __name__ == "__main__":
    main()
