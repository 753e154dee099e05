"""Model families: names, shapes and rules of their weights, used by trainers, engines and the
converter alike."""
