"""All families: importing their files registers them."""

from zoo import diffusion, frames, networks, simplices, solids, supports
from zoo.system import FAMILIES, SIZES, System, build

__all__ = ["FAMILIES", "SIZES", "System", "build", "diffusion", "frames", "networks", "simplices", "solids", "supports"]
