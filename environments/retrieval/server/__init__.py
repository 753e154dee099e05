"""The retrieval server: one process that answers the searches of any number of rollouts over
HTTP."""
