"""What happens before a run: whether it can start, and what it will take of memory and time."""
