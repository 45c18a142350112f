"""Print the oldest versions that pyproject.toml allows of the dependencies and of the given extras, as constraints for pip.

python .ci/lower_bounds.py test > constraints.txt
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BOUND = re.compile(r"([A-Za-z0-9._-]+)(\[[^]]*\])?>=([0-9][0-9.]*)")


def constraints(extras: list[str]) -> list[str]:
    """Return ``name==version`` of all requirements that have a bound; those of our own extras are followed."""
    lines = []
    for requirement in PROJECT["dependencies"] + [
        one for name in extras for one in PROJECT["optional-dependencies"][name]
    ]:
        if own := re.fullmatch(r"penstock\[(.*)\]", requirement):
            lines += [line for line in constraints(own[1].split(",")) if line not in lines]
        elif bound := BOUND.fullmatch(requirement):
            lines.append(f"{bound[1]}=={bound[3]}")
        else:
            raise ValueError(f"{requirement!r} of pyproject.toml has no lower bound of the form name>=1.2")
    return list(dict.fromkeys(lines))


if __name__ == "__main__":
    print(*constraints(sys.argv[1:]), sep="\n")
