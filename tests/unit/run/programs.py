"""What programs of tests begin with."""

WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
"""
"""The clock of a run imports it, which takes a second; a program that measures no phase has no use for it."""
