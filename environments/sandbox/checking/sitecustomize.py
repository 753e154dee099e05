"""In a check Python finds modules of the working folder, and of the script's own, behind all that
is installed: a `json.py` that a policy left there is not the json that a check imports.

With PYTHONSAFEPATH=1 neither folder stands in `sys.path`, where packages look for plug-ins too."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class WorkingFolderLast:
    """The last of Python's finders."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None:  # within a package
            return None
        script = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv[0] else ""
        return PathFinder.find_spec(name, [folder for folder in (script, os.getcwd()) if folder])


sys.meta_path.append(WorkingFolderLast)
