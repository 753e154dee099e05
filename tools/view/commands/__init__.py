"""The commands `view`, `compare`, `show` and `ask` of `rlflow`."""
