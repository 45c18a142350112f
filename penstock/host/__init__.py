"""What the package asks of the process and the machine: threads, forks, signals, launchers, scratch folders."""
