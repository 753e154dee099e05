"""The kit for authors: environments, parts of algorithms and tiny policies, written, checked and
played (`rlflow env`, `rlflow algorithm`)."""
