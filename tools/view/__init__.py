"""What a run wrote, shown to a person: pages, charts, comparisons, the terminal."""
