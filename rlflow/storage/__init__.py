"""Files: written whole or not at all, checked by their content, and read without running code."""
