"""NetHack, played by text."""
