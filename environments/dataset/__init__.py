"""Prompts out of files and a reward function, as an environment without a class."""
