"""Trainer ranks as Ray actors, on this machine or a cluster. The only folder that imports ray."""
