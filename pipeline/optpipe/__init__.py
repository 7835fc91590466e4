"""optpipe: from a trained model to a signed-off, deployable inference engine.

The names of the library are imported at their first use, so that `import optpipe` takes milliseconds and no torch:

>>> import optpipe as op
>>> op.Model
<class 'optpipe.api.model.Model'>
"""

from importlib import import_module

__version__ = "0.1.0"

_PLACES = {
    "Bench": "api.bench",
    "Build": "api.build",
    "Builds": "api.builds",
    "Data": "api.data",
    "Dossier": "api.verdict",
    "Listener": "core.events",
    "Metric": "api.metric",
    "Model": "api.model",
    "History": "api.history",
    "Policy": "api.policy",
    "Verdict": "api.verdict",
    "Workspace": "api.workspace",
    "history": "api.history",
    "load": "api.verdict",
    "OptpipeError": "core.errors",
    "BadInputError": "core.errors",
    "MissingError": "core.errors",
    "StageError": "core.errors",
    "GateError": "core.errors",
    "InconclusiveError": "core.errors",
}
"""The module of each public name. `__init__.pyi` declares the same names for type checkers."""

__all__ = [*_PLACES]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'optpipe' has no attribute {name!r}")
    attribute: object = getattr(import_module(f"optpipe.{_PLACES[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
