"""Maps rectangles of source tensors to target tensors, in either direction."""
