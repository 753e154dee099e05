"""Environments and other plug-ins that come with rlflow, a folder each, outside the core: found by
entry points."""
