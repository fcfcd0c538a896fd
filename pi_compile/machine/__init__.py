"""The machine: measuring its rates, its profile on disk, and a report of what is installed."""
