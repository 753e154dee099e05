"""Advantages: how much better an attempt, a turn or a token was than expected. One small file per
method."""

BUILT_IN = {
    "grpo": "rlflow.algorithms.advantages.grpo:grpo",
    "rloo": "rlflow.algorithms.advantages.rloo:rloo",
    "reinforce": "rlflow.algorithms.advantages.reinforce:Reinforce",
    "reinforce_pp": "rlflow.algorithms.advantages.reinforce_pp:ReinforcePP",
    "running": "rlflow.algorithms.advantages.running:RunningNormalization",
    "maxrl": "rlflow.algorithms.advantages.maxrl:maxrl",
    "gdpo": "rlflow.algorithms.advantages.gdpo:GDPO",
    "turn_returns": "rlflow.algorithms.advantages.turns:turn_returns",
    "step_grpo": "rlflow.algorithms.advantages.turns:step_grpo",
    "opd": "rlflow.algorithms.advantages.opd:OnPolicyDistillation",
    "gae": "rlflow.algorithms.advantages.gae:GAE",
    "vtrace": "rlflow.algorithms.advantages.vtrace:VTrace",
}
"""Name -> `module:Name`."""
