"""The embedded encyclopedia: a fictional world, its questions, demonstrations, and the shell of its
starting policy."""
