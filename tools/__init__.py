"""Command lines around rlflow; imported as rlflow_tools where the package is installed."""
