"""Metrics: names with units, reductions, phase timers, peak memory, and the sinks that a run writes to."""
