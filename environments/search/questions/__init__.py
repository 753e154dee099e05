"""Questions of the field's releases as tasks: RLinf, Search-R1, ASearcher, FlashRAG, and their
seven evaluation sets.

`tables` reads rows out of files, `layouts` knows what the rows of each release look like, `sets`
finds evaluation sets in a folder, and `reading` puts them together.
"""

from __future__ import annotations

from rlflow_environments.search.questions.reading import QuestionSource, read_tasks
from rlflow_environments.search.questions.row_formats import ROW_FORMATS
from rlflow_environments.search.questions.sets import EVALUATION_SETS, find_sets

__all__ = ["read_tasks", "QuestionSource", "ROW_FORMATS", "EVALUATION_SETS", "find_sets"]
