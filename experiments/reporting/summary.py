"""The result of a run in words."""

from __future__ import annotations

from typing import Any

from penstock.spmv import format_nbytes

#: A model has no units of its own: its results have those of its input.
_UNITS = {
    "tip deflection": "in the model's unit of length",
    "tip twist": "radians",
    "tip temperature": "in the model's unit of temperature",
}
#: Modes that a summary lists.
_LISTED_MODES = 20
#: Parts of a run that are shorter are not shown.
_LEAST_SECONDS = 0.005


def summary_of(result: dict[str, Any]) -> str:
    """Return the contents of a ``result.json`` in words, one line per fact."""
    if "stiffness_samples" in result:
        return _samples_summary(result)
    if result.get("analysis") == "modes":
        return _modes_summary(result)
    lines = [
        f"{result['message']}",
        f"unknowns         {result['unknowns']:,}, {result['nonzeros']:,} nonzeros, "
        f"matrix of {format_nbytes(result['matrix_nbytes'])} as {result['format']}",
        f"iterations       {result['iterations']}, true relative residual {_number(result['true_residual'])}",
    ]
    if result.get("tip_deflection") is not None:
        lines.append(f"{quantity_of(result):<16} {_deflection(result)}")
    if result.get("columns") and not result["samples"]:
        lines.append("the loaded end   under each load case")
        lines += [f"  {column['name']:<14} {_end_of(column)}" for column in result["columns"]]
    if result.get("largest_error") is not None:
        lines.append(f"error            {result['largest_error']:.3g} at most, against the known solution, all ones")
    if result.get("ranks", 1) > 1:
        lines.append(
            f"ranks            {result['ranks']}, with about {result['unknowns'] // result['ranks']:,} unknowns each"
        )
    if result["budget_nbytes"] is not None:
        lines.append(
            f"matrix storage   {format_nbytes(result['peak_budget_nbytes'])} at most, of a budget of "
            f"{format_nbytes(result['budget_nbytes'])}"
        )
    if result["bytes_streamed"]:
        lines.append(_traffic(result))
    if result["link_fraction"] is not None:
        lines.append(_sweeps(result))
    return "\n".join([*lines, *_seconds(result)])


def _seconds(result: dict[str, Any]) -> list[str]:
    """Return where the time of the command went; results of old versions only name parts of it."""
    timings = result.get("timings")
    if timings is None:
        return [f"seconds          {_parts(result['seconds'])}"]
    shown = {name: value for name, value in timings.items() if value >= _LEAST_SECONDS}
    lines = [f"seconds          {sum(timings.values()):.2f} in all: {_parts(shown)}"]
    if result.get("earlier_seconds"):
        lines.append(f"earlier runs     {result['earlier_seconds']:.2f} seconds of iterations, before this one resumed")
    return lines


def _parts(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


def quantity_of(result: dict[str, Any]) -> str:
    """Return the name of the deflection; results of old versions do not contain it."""
    return str(result.get("quantity", "tip deflection"))


def solve_seconds(result: dict[str, Any]) -> float:
    """Return the seconds of a solve including the set-up of its preconditioner, where that is recorded separately."""
    return float(result["seconds"].get("preconditioner", 0.0) + result["seconds"]["solve"])


def _number(value: float | None) -> str:
    """Return a number as text; null in JSON stands for one that is not finite."""
    return "not a finite number" if value is None else f"{value:.6g}"


def _traffic(result: dict[str, Any]) -> str:
    rate = result["bytes_streamed"] / max(solve_seconds(result), 1e-9) / 1e9
    direct = ", read around the page cache" if result["direct_reads"] else ""
    return (
        f"streamed         {format_nbytes(result['bytes_streamed'])} in {result['sweeps']} sweeps, "
        f"{rate:.3g} GB/s over the whole solve{direct}"
    )


def _sweeps(result: dict[str, Any]) -> str:
    predicted, memory = result["predicted_sweep_seconds"], result["memory_fraction"]
    return (
        f"a sweep          {result['sweep_seconds'] * 1e3:.3g} ms with all vector work"
        + ("" if predicted is None else f", {predicted * 1e3:.3g} ms predicted")
        + f"; {100 * result['link_fraction']:.3g} % of the link's rate"
        + ("" if memory is None else f", {100 * memory:.3g} % of the memory's")
        + (", through staging buffers" if result["staged"] else "")
    )


def _deflection(result: dict[str, Any]) -> str:
    """Return the deflection; for samples also the uncertainty of its mean."""
    text, deviation = _number(result["tip_deflection"]), result.get("tip_deflection_deviation")
    if deviation is None:
        return f"{text} {_UNITS[quantity_of(result)]}{_beside_beam_theory(result)}"
    samples = result.get("stiffness_samples")
    converged = [column["reason"] == "converged" for column in result.get("columns", ())]
    count = sum(converged) if samples is None else sum(sample["converged"] for sample in samples)
    return f"mean {text} +- {deviation / count**0.5:.2g}, standard deviation {deviation:.4g}, of {count} samples"


def _end_of(column: dict[str, Any]) -> str:
    """Return the end's movement under one load case."""
    quantity = quantity_of(column)
    return f"{quantity} {_number(column['tip_deflection'])} {_UNITS[quantity]}"


def _beside_beam_theory(result: dict[str, Any]) -> str:
    """Return the deflection by beam theory and the difference from it, where it applies."""
    theory, deflection = result.get("beam_theory"), result["tip_deflection"]
    if not theory or deflection is None:
        return ""
    return (
        f"; by Timoshenko's beam theory {_number(theory)}, a difference of {100 * abs(deflection / theory - 1):.2g} %"
    )


def _modes_summary(result: dict[str, Any]) -> str:
    streamed = f", {format_nbytes(result['bytes_streamed'])} streamed" if result["bytes_streamed"] else ""
    lines = [
        f"{result['message']}",
        f"unknowns         {result['unknowns']:,}, {result['nonzeros']:,} nonzeros, "
        f"matrix of {format_nbytes(result['matrix_nbytes'])} as {result['format']}",
        f"iterations       {result['iterations']}, {result['sweeps']} passes over the matrix{streamed}",
    ]
    if result["zeros"]:
        lines.append(f"free             {result['zeros']} motions without energy")
    if result["cuts_cluster"]:
        lines.append("cluster          the next frequency is that of the last mode: raise analysis.count to have all")
    masses = result["effective_mass"]
    lines.append(
        " ".join(f"{title:>12}" for title in ("mode", "frequency", "residual", *(f"mass {axis}" for axis in masses)))
    )
    for number, (frequency, residual) in enumerate(zip(result["frequencies"], result["residuals"], strict=True)):
        if number == _LISTED_MODES:
            lines.append(f"{'...':>12} all {len(result['frequencies'])} are in result.json")
            break
        shares = [f"{of[number]:>12.1%}" for of in masses.values()]
        lines.append(" ".join([f"{number + 1:>12d}", f"{frequency:>12.5g}", f"{residual or 0.0:>12.2g}", *shares]))
    return "\n".join([*lines, *_seconds(result)])


def _samples_summary(result: dict[str, Any]) -> str:
    samples = result["stiffness_samples"]
    failed = [str(sample["seed"]) for sample in samples if not sample["converged"]]
    iterations = [sample["iterations"] for sample in samples]
    lines = [
        f"{len(samples) - len(failed)} of {len(samples)} samples of the stiffness converged"
        + (f"; not those of seeds {', '.join(failed)}" if failed else ""),
        f"{quantity_of(result):<16} {_deflection(result)}",
        f"iterations       {min(iterations)} to {max(iterations)} a sample, {result['unknowns']:,} unknowns",
        f"all samples      {result['seconds']['solve']:.2f} seconds of set-ups and solves",
    ]
    return "\n".join([*lines, *(_seconds(result) if "timings" in result else ())])
