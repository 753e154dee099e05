"""Loss terms: (PolicyOutput, Batch) -> per-token loss (B, T). One small file per term."""

BUILT_IN = {
    "ppo_clip": "rlflow.algorithms.losses.ppo_clip:PPOClipLoss",
    "gspo": "rlflow.algorithms.losses.gspo:GSPOLoss",
    "gmpo": "rlflow.algorithms.losses.gmpo:GMPOLoss",
    "cispo": "rlflow.algorithms.losses.cispo:CISPOLoss",
    "aipo": "rlflow.algorithms.losses.aipo:AIPOLoss",
    "soft_adaptive": "rlflow.algorithms.losses.soft_adaptive:SoftAdaptiveLoss",
    "reinforce": "rlflow.algorithms.losses.policy_gradient:ReinforceLoss",
    "kl": "rlflow.algorithms.losses.kl:KLLoss",
    "entropy": "rlflow.algorithms.losses.entropy:EntropyLoss",
    "entropy_target": "rlflow.algorithms.losses.entropy:EntropyTargetLoss",
    "value": "rlflow.algorithms.losses.value:ValueLoss",
    "sft": "rlflow.algorithms.losses.sft:SFTLoss",
    "teacher_kl": "rlflow.algorithms.losses.teacher_kl:TeacherKLLoss",
}
"""Name -> `module:Name`."""
