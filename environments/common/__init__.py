"""Shared by several environments: an OpenAI-compatible endpoint, JSON Lines, options."""
