"""The gateway: the policies in front of running engines, for clients that speak OpenAI's protocol.

It needs the extra ``serve``; importing it without says so. Nothing else of chimsim imports it at start.
"""

from __future__ import annotations

from importlib.util import find_spec

from chimsim.errors import ChimsimError

_MISSING = [name for name in ("aiohttp", "prometheus_client", "starlette", "uvicorn") if find_spec(name) is None]
if _MISSING:
    raise ChimsimError(f'the gateway needs {" and ".join(_MISSING)}; install them: pip install "chimsim[serve]"')
