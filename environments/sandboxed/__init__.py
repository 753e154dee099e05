"""Environments whose policies write programs, which run in a sandbox."""
