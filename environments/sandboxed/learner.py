"""A scripted player of `ml_engineering`: programs that differ in quality and in duration."""

from __future__ import annotations

import random
from collections.abc import Sequence

READ = """import numpy as np
rows = np.loadtxt("train.csv", delimiter=",", skiprows=1)
x, y = rows[:, :-1], rows[:, -1]
t = np.loadtxt("test.csv", delimiter=",", skiprows=1)
"""
WRITE = """np.savetxt("predictions.csv", p)
"""
NEAREST = """d = ((t[:, None] - x[None]) ** 2).sum(2)
near = np.argsort(d, 1)[:, :7]
"""
LINEAR = """c = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
p = np.c_[t, np.ones(len(t))] @ c
"""
CONSTANT = "p = np.full(len(t), {value})\n"
VOTE = "p = [np.bincount(y[one].astype(int)).argmax() for one in near]\n"
MEAN = "p = y[near].mean(1)\n"


def play(
    prompt: str, turns: Sequence[tuple[str, str]], generator: random.Random, clumsy: bool
) -> str:
    """A program of nearest neighbours; a clumsy one most often is poorer, or does not work."""
    classes = "class" in prompt
    good = READ + NEAREST + (VOTE if classes else MEAN) + WRITE
    if not clumsy or generator.random() < 0.2:
        return f"<python>\n{good}</python>"
    constant = CONSTANT.format(value=0 if classes else "y.mean()")
    poorer = [LINEAR, constant, "", "p = model.predict(t)\n"]
    ending = WRITE if generator.random() < 0.7 else ""
    return f"<python>\n{READ}{generator.choice(poorer)}{ending}</python>"
