"""Questions and answers from the user's own documents: `rlflow search qa`.

    documents -> passages -> candidates (by rule or by a model) -> screening -> split

`documents` reads a folder, `passages` cuts texts, `english` finds names and facts, `candidates`
composes questions, `screening` keeps those that retrieval can answer, `splitting` keeps validation
apart from training, and `making` does one after the other. `writing` has a model behind an
OpenAI-compatible endpoint compose the questions (`search.chat`).
"""
