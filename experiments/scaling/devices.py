"""Rates of common GPUs, for plans made on a machine that has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from penstock.experiments.cantilever.sections import Section
from penstock.experiments.reporting.yaml_files import read_configuration
from penstock.spmv import InputError
from penstock.streaming import LinkRates
from penstock.streaming.planning.estimate import TYPICAL

# Fractions of the rates in the data sheet that kernels and transfers of an H200 reach.
_OF_MEMORY, _OF_LINK = 0.92, 0.87
_PCIE_4, _PCIE_5 = 31.5, 63.0

#: GB/s of memory and of the link to the host by name, from data sheets.
DEVICES: dict[str, tuple[float, float]] = {
    "a100-40": (1555, _PCIE_4),
    "a100-80": (2039, _PCIE_4),
    "b200": (8000, _PCIE_5),
    "h100": (3350, _PCIE_5),
    "h200": (4800, _PCIE_5),
    "l40s": (864, _PCIE_4),
    "rtx4090": (1008, _PCIE_4),
    "v100": (900, 15.8),
}


class _RatesFile(Section):
    """Rates of a machine, in GB/s."""

    memory: float = Field(gt=0, allow_inf_nan=False, description="GB/s that kernels read")
    link: float = Field(gt=0, allow_inf_nan=False, description="GB/s from the host's memory to the device")


def device_rates(source: str) -> LinkRates:
    """Return the rates of a GPU of :data:`DEVICES`, or those in a YAML file such as ``{memory: 4400, link: 55}``, in GB/s."""
    if source.lower() in DEVICES:
        memory, link = DEVICES[source.lower()]
        memory, link = _OF_MEMORY * memory, _OF_LINK * link
    elif Path(source).exists():
        rates = read_configuration(source, _RatesFile)
        memory, link = rates.memory, rates.link
    else:
        raise InputError(f"--rates takes a file, or one of {', '.join(DEVICES)}; there is no {source}")
    return replace(TYPICAL, memory=1e9 * memory, link=1e9 * link)
