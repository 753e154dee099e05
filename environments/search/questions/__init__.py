"""Questions of the field's releases as tasks: RLinf, Search-R1, ASearcher, FlashRAG, and their
seven evaluation sets.

`tables` reads rows out of files, `layouts` knows what the rows of each release look like, `sets`
finds evaluation sets in a folder, and `reading` puts them together.
"""

from __future__ import annotations

from rlflow_environments.search.questions.files import EVALUATION_SETS, find_sets
from rlflow_environments.search.questions.reading import ROW_FORMATS, QuestionSource, read_tasks

__all__ = ["read_tasks", "QuestionSource", "ROW_FORMATS", "EVALUATION_SETS", "find_sets"]
