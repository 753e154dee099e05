"""Index folders built from corpora, and advice on which index fits."""
