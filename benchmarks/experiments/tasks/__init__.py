"""Small environments in several turns, of which the experiments are made."""
