"""Finding a user's own policy class, by ``my_file.py:MyPolicy`` or ``my_module:MyPolicy``.

The same file with the same content gives the same class object, in whatever order things are loaded. Code of
the file runs on loading; what it raises comes back as a `PolicyError`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import is_dataclass
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import cast

from policies.interface import Policy, PolicyError
from policies.knobs import near

_METHODS = ("dispatch", "on_progress", "on_complete", "on_forget")


def load_class(spec: str) -> type[Policy]:
    """The policy class that ``spec`` names.

    Raises:
        PolicyError: no such file, module or class, it fails to load, or the class is no policy.
    """
    where, _, name = spec.rpartition(":")
    module = _file(spec, Path(where)) if where.endswith(".py") else _module(spec, where)
    known = [n for n, v in vars(module).items() if isclass(v) and v.__module__ == module.__name__]
    found = getattr(module, name, None)
    if found is None:
        raise PolicyError(
            f"policy {spec!r}: {where} has no class {name!r}{near(name, known)} (it has: {', '.join(known) or 'none'})"
        )
    return _checked(spec, found)


def _checked(spec: str, found: object) -> type[Policy]:
    if not isclass(found):
        raise PolicyError(f"policy {spec!r} is not a class but {type(found).__name__}")
    dispatch = getattr(found, "dispatch", None)
    if not callable(dispatch) or dispatch is Policy.dispatch:
        raise PolicyError(f"policy {spec!r} is not a policy: the class has no dispatch(now, request, cluster)")
    lacking = [m for m in (*_METHODS, "preemptive", "reads", "quantile") if not hasattr(found, m)]
    if lacking:
        raise PolicyError(
            f"policy {spec!r} lacks {', '.join(lacking)}: derive the class from policies.interface.Policy"
        )
    if not is_dataclass(found):
        raise PolicyError(f"policy {spec!r} is not a dataclass: put @dataclass above it, its fields are its knobs")
    return cast(type[Policy], found)


def _file(spec: str, path: Path) -> ModuleType:
    try:
        path = path.expanduser().resolve()
        source = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"policy {spec!r}: {path}: {(error.strerror or str(error)).lower()}") from None
    # Named by place and content: equal files are one module, and a file that has changed is another one.
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    name = f"policy_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise PolicyError(f"policy {spec!r}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(found)
    # Dataclasses look their module up while they are made.
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise _failed(spec, str(path), error) from error
    return module


def _module(spec: str, name: str) -> ModuleType:
    # A console script does not search the current folder, where a user's module usually lies.
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise PolicyError(f"policy {spec!r}: there is no module {missing!r}") from None
        raise _failed(spec, name, error) from error
    except Exception as error:
        raise _failed(spec, name, error) from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _failed(spec: str, where: str, error: Exception) -> PolicyError:
    frames = traceback.extract_tb(error.__traceback__)
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    return PolicyError(f"policy {spec!r}: {where} fails to load, line {line}: {type(error).__name__}: {error}")
