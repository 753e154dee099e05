"""Mobile-Agent-v3 once more, where chance succeeds now and then: 1 in 27."""

from __future__ import annotations

import functools
from dataclasses import replace

from experiments import mobile_agent

LENGTH, STEPS = 3, 40

EXPERIMENT = replace(
    mobile_agent.EXPERIMENT,
    name="mobile_agent_seldom",
    setup=f"As above with sequences of {LENGTH} keys, which chance gets right once in 27, and {STEPS} steps.",
    run=functools.partial(mobile_agent.run, length=LENGTH, steps=STEPS),
)
