"""Checkpoint conversion on the command line; the work is done in rlflow/weights."""
