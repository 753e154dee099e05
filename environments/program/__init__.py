"""Agents of the user's own, as environments: programs, or functions of this process."""
