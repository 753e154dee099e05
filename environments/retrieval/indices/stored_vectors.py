"""Single vectors of a faiss index as it keeps them, to hold against what an encoder makes of the
same passages."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlflow_environments.retrieval.indices.faiss_index import import_faiss

NEAREST_LISTS = 8  # in one of which a passage's own vector is filed, whatever rounding does


def stored_vector(index: Any, row: int, vector: np.ndarray) -> np.ndarray | None:
    """(dimensions,) float32 of a row; None where an index with lists does not have the row in a
    list near `vector`, which is what the row should hold: no list is read but those."""
    faiss = import_faiss()
    if not isinstance(index, faiss.IndexIVF):
        return index.reconstruct(row)
    _, near = index.quantizer.search(vector[None], min(NEAREST_LISTS, index.nlist))
    for number in near[0].tolist():
        size = index.invlists.list_size(number) if number >= 0 else 0
        if not size:
            continue
        places = np.flatnonzero(faiss.rev_swig_ptr(index.invlists.get_ids(number), size) == row)
        if len(places):
            found = np.empty(index.d, np.float32)
            index.reconstruct_from_offset(number, int(places[0]), faiss.swig_ptr(found))
            return found
    return None


def keeps_exactly(index: Any) -> bool:
    """Whether vectors are kept as they are, or in eight bits per number at the least."""
    faiss = import_faiss()
    if isinstance(index, (faiss.IndexFlat, faiss.IndexIVFFlat, faiss.IndexHNSWFlat)):
        return True
    quantizer = getattr(index, "sq", None)
    fine = {
        faiss.ScalarQuantizer.QT_8bit,
        faiss.ScalarQuantizer.QT_8bit_uniform,
        faiss.ScalarQuantizer.QT_fp16,
    }
    return quantizer is not None and quantizer.qtype in fine


def can_be_read(index: Any) -> bool:
    """Whether `stored_vector` knows how: not of lists behind a transform of the vectors."""
    faiss = import_faiss()
    return isinstance(index, faiss.IndexIVF) or faiss.try_extract_index_ivf(index) is None
