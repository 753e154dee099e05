"""Transforms: Batch -> Batch, over the rewards or the advantages of a step, or over a whole
mini-batch before its update. One small file per method."""

BUILT_IN = {
    "kl_reward": "rlflow.algorithms.transforms.kl_reward:KLReward",
    "overlong": "rlflow.algorithms.transforms.overlong:Overlong",
    "affine_reward": "rlflow.algorithms.transforms.reward_scale:AffineReward",
    "normalize_advantages": "rlflow.algorithms.transforms.normalize:NormalizeAdvantages",
    "duration_weight": "rlflow.algorithms.transforms.row_weights:duration_weight",
    "size_weight": "rlflow.algorithms.transforms.row_weights:size_weight",
    "kept_mean": "rlflow.algorithms.transforms.kept_mean:KeptMean",
    "decoupled": "rlflow.algorithms.transforms.decoupled:Decoupled",
    "tis": "rlflow.algorithms.transforms.tis:TruncatedImportance",
    "mis": "rlflow.algorithms.transforms.mis:MaskedImportance",
    "icepop": "rlflow.algorithms.transforms.icepop:IcePop",
    "kpop": "rlflow.algorithms.transforms.kpop:KPop",
    "dppo": "rlflow.algorithms.transforms.dppo:DPPO",
    "m2po": "rlflow.algorithms.transforms.m2po:M2PO",
    "sequence_mask": "rlflow.algorithms.transforms.sequence_mask:SequenceMask",
    "high_entropy_tokens": "rlflow.algorithms.transforms.high_entropy_tokens:HighEntropyTokens",
    "high_entropy_steps": "rlflow.algorithms.transforms.high_entropy_steps:HighEntropySteps",
    "only_sources": "rlflow.algorithms.transforms.only_sources:OnlySources",
}
"""Name -> `module:Name`."""
