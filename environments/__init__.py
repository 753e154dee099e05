"""Environments that come with rlflow, each in a folder of its own. Outside the core: they are found by entry points."""
