"""What several environments share: an OpenAI-compatible endpoint, HTTP, JSON Lines, options."""
