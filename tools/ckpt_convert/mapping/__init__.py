"""Which rectangles of source tensors make each target tensor, in either direction."""
