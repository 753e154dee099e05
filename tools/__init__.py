"""Command lines around rlflow; imported as rlflow_tools where the package is installed."""

import logging

# A run's log and the command line listen to rlflow's loggers.
logging.getLogger(__name__).parent = logging.getLogger("rlflow")
