"""What a job did that the process it was forked from can do once for all: imports, and the schemas of pydantic models,
which SDKs with thousands of them, such as OpenAI's, build when a model is first used.

What a job reports is taken in by a fork first (the probe), so that what starts a thread or hangs does no harm.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any, Dict, List  # noqa: UP035  (evaluated, and Python 3.9 must do it)

from .processes import threads

Late = Dict[str, List[str]]  # noqa: UP006  ("imports": names of modules; "models": MODULE:CLASS)


def report(before: set[str], own_folder: str) -> Late:
    """What happened since the fork, when the modules `before` were there, in order; nothing of the job's own folder."""
    here = os.path.realpath(own_folder) + os.sep

    def foreign(name: str) -> bool:
        path = getattr(sys.modules.get(name), "__file__", None)
        return path is not None and not os.path.realpath(path).startswith(here)

    late = [n for n in list(sys.modules) if n not in before and n not in ("__main__", "__mp_main__")]
    built = [m for m in pydantic_models() if m.__dict__.get("__pydantic_complete__") and "<" not in m.__qualname__]
    return {
        "imports": [name for name in late if foreign(name)],
        "models": sorted(f"{m.__module__}:{m.__qualname__}" for m in built if foreign(m.__module__)),
    }


def take_in(late: Any) -> Late:
    """Import and build what can be; stop before the first after which a thread is alive. What was done.

    `late` comes from a file that a job could have written.
    """
    done: Late = {"imports": [], "models": []}
    for name in listed(late, "imports"):
        if name not in sys.modules:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        if threads():
            return done
        done["imports"].append(name)
    wanted = set(listed(late, "models"))
    for model in pydantic_models():
        name = f"{model.__module__}:{model.__qualname__}"
        if name in wanted and model.__dict__.get("__pydantic_complete__") is False:
            with contextlib.suppress(BaseException):
                model.model_rebuild(raise_errors=False, _types_namespace={})  # {}: no names of this function
            if threads():
                return done
            done["models"].append(name)
    return done


def listed(late: Any, key: str) -> list[str]:
    names = late.get(key) if isinstance(late, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def pydantic_models() -> list[Any]:
    """All classes of models, if pydantic (2 or later) is imported here."""
    base: Any = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    found = dict.fromkeys([base] if hasattr(base, "model_rebuild") else [])
    queue = list(found)
    while queue:
        new = [model for model in type.__subclasses__(queue.pop()) if model not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return list(found)
