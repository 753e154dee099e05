"""Executable contracts: programs that look for what would break a training run in an environment or
a part."""
