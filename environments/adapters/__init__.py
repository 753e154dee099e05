"""Environments of other libraries, spoken to in text; each needs its package."""
