"""Parts of algorithms tried on a small made-up step, before a run has one of its own."""
