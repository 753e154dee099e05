"""What `benchmarks/fuzz.py` is made of: a module per thing that is given nonsense, and what they share."""
