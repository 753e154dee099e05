"""Actions of gymnasium's spaces, as a policy writes them: a number, text, or JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlflow_environments.common.text import load_json

LONGEST = 10_000  # characters of an action
ARRAYS = ("MultiDiscrete", "MultiBinary", "Box")


def readable(space: Any) -> bool:
    """Whether `action_of` makes actions of the space."""
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        return all(readable(part) for part in _parts(space).values())
    return kind in ("Text", "Discrete", *ARRAYS)


def described(space: Any) -> str:
    """How actions are written: `0 to 3`, `text`, `[0 to 4, 0 to 1] as JSON`."""
    kind = type(space).__name__
    as_json = kind in ("Dict", "Tuple", *ARRAYS) and readable(space)
    return _form(space) + (" as JSON" if as_json else "")


def _form(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Text":
        return "text"
    if kind == "Discrete":
        return f"{space.start} to {space.start + space.n - 1}"
    if kind == "MultiDiscrete" and space.nvec.ndim == 1:
        ranges = zip(space.start, space.nvec, strict=True)
        return f"[{', '.join(f'{start} to {start + count - 1}' for start, count in ranges)}]"
    if kind == "MultiBinary":
        return f"[{space.shape} of 0 and 1]"
    if kind == "Box":
        return f"[{space.shape} of {space.low.min():g} to {space.high.max():g}]"
    if kind in ("Dict", "Tuple"):
        named = kind == "Dict"
        parts = _parts(space).items()
        forms = [f'"{name}": {_form(part)}' if named else _form(part) for name, part in parts]
        return f"{{{', '.join(forms)}}}" if named else f"[{', '.join(forms)}]"
    return str(space)


def action_of(space: Any, said: str) -> Any:
    """The action that a response writes; not all are of the space. Raises ValueError, TypeError,
    KeyError, RecursionError, OverflowError for none."""
    if len(said) > LONGEST:
        raise ValueError("too long")
    kind = type(space).__name__
    if kind == "Text":
        return said
    if kind == "Discrete" and not (said.lstrip("-").isdecimal() and len(said) < 10):
        raise ValueError("no number")
    if kind == "Discrete":
        return _value(space, int(said))
    return _value(space, load_json(said.encode(errors="replace")))


def _value(space: Any, value: Any) -> Any:
    kind = type(space).__name__
    if kind in ("Dict", "Tuple"):
        parts = _parts(space)
        given = value if kind == "Dict" else dict(enumerate(value))
        if not isinstance(given, dict) or given.keys() != parts.keys():
            raise ValueError("other parts")
        made = {name: _value(part, given[name]) for name, part in parts.items()}
        return made if kind == "Dict" else tuple(made.values())
    if kind not in ARRAYS:
        if isinstance(value, bool):
            raise ValueError("neither a number nor text")
        return value
    numbers = np.asarray(value)
    if numbers.dtype.kind not in ("iuf" if kind == "Box" else "iu"):
        raise ValueError("not whole numbers")
    with np.errstate(over="ignore"):
        made = numbers.astype(space.dtype)
    if not np.isfinite(made).all() or (made.dtype.kind in "iu" and (made != numbers).any()):
        raise ValueError("not of the space's type")  # 257 would become 1
    return made


def _parts(space: Any) -> dict[Any, Any]:
    spaces = space.spaces
    return dict(spaces) if isinstance(spaces, dict) else dict(enumerate(spaces))
