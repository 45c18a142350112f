"""What the records say together: shares that converged, geometric means against peers, the worst ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from zoo.peers import DIRECT

__all__ = ["geometric_mean", "seconds_of_solvers", "summary"]

Record = dict[str, Any]
_WORST = 8


def seconds_of_solvers(record: Record) -> dict[str, float]:
    """Return the CPU seconds of those that solved a system, penstock among them."""
    own = {"penstock": record["seconds"]} if record["converged"] else {}
    return own | record["peers"]


def geometric_mean(numbers: Iterable[float]) -> float:
    """Return the geometric mean; of nothing, not a number."""
    logarithms = [math.log(of) for of in numbers]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def summary(records: list[Record]) -> str:
    """Return the summary as lines of text."""
    solved = [record for record in records if record["converged"]]
    rounded = sum(record["at_rounding_floor"] for record in solved)
    lines = [
        f"{len(solved)} of {len(records)} systems converged" + (f", {rounded} to the rounding floor" * (rounded > 0))
    ]
    for peer in sorted({name for record in records for name in record["solvers"]}):
        tried = [record["solvers"][peer] for record in records if peer in record["solvers"]]
        lines.append(f"  {peer}: {sum(of['converged'] for of in tried)} of {len(tried)}")
    for title, without in (("the best iterative peer", DIRECT), ("the best of all peers", ())):
        lines += _against(title, solved, without)
    failed = [record for record in records if not record["converged"]]
    for record in failed:
        solvers = ", ".join(record["peers"]) or "no peer either"
        lines.append(f"  not solved: {record['name']} ({record['message']}); solved by: {solvers}")
    return "\n".join(lines)


def _against(title: str, solved: list[Record], without: tuple[str, ...]) -> list[str]:
    """Return the ratios of penstock's CPU time to that of the fastest of some peers."""
    ratios = {}
    for record in solved:
        peers = {name: of for name, of in record["peers"].items() if name not in without}
        if peers:
            best = min(peers, key=peers.__getitem__)
            ratios[record["name"]] = (record["seconds"] / peers[best], best)
    if not ratios:
        return []
    mean = geometric_mean(ratio for ratio, _ in ratios.values())
    faster = sum(ratio <= 1 for ratio, _ in ratios.values())
    lines = [f"CPU time against {title}: {mean:.2f} in the geometric mean of {len(ratios)}, faster on {faster}; worst:"]
    worst = sorted(ratios.items(), key=lambda item: -item[1][0])[:_WORST]
    return lines + [f"  {name}: {ratio:.2f} times {best}" for name, (ratio, best) in worst]
