"""Which questions can be answered from a corpus at all."""
