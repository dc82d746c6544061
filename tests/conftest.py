"""Settings of all tests: property tests have no deadline, for how long a case takes is the machine's business."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("chimsim", deadline=None)
settings.load_profile("chimsim")
