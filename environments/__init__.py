"""Environments and other plug-ins that come with rlflow, a folder each, outside the core: found by
entry points."""

import logging

# A run's log and the command line listen to rlflow's loggers.
logging.getLogger(__name__).parent = logging.getLogger("rlflow")
