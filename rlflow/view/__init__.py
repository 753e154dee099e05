"""Runs made visible: every episode token by token, and runs held against each other, each as one file that needs no server."""
