"""Environments whose policies call tools in the form of their chat template."""
