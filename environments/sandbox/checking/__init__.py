"""A folder for PYTHONPATH: how Python imports in a check of what a policy left behind."""
