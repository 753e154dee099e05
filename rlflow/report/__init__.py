"""Runs for people: what a run or an evaluation keeps of its episodes, and how it is shown."""
