"""What talks to running engines: client, metrics reader, measuring driver, and recorder of live runs.

It needs the extra ``live``; importing it without says so. Nothing else of chimsim imports it at start.
"""

from __future__ import annotations

from importlib.util import find_spec

from chimsim.errors import ChimsimError

_MISSING = [name for name in ("aiohttp", "prometheus_client") if find_spec(name) is None]
if _MISSING:
    raise ChimsimError(f'talking to engines needs {" and ".join(_MISSING)}; install them: pip install "chimsim[live]"')
