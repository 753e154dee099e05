"""Everything that surrounds the training loop: what a run is assembled from, remembers, writes and
shows."""
