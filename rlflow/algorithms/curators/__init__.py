"""Curators: which training tasks come next, with feedback from what came of the others. One small
file per method."""

BUILT_IN = {
    "epochs": "rlflow.algorithms.curators.epochs:Epochs",
    "adaptive": "rlflow.algorithms.curators.adaptive:Adaptive",
    "filter_solved": "rlflow.algorithms.curators.filter_solved:FilterSolved",
    "greso": "rlflow.algorithms.curators.greso:Greso",
}
"""Name -> `module:Name`."""
