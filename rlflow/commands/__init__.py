"""The command line `rlflow`: one file per command."""
