"""Compiles the simulator's hot path to C with mypyc, when a wheel is built with HATCH_BUILD_HOOKS_ENABLE=1.

The same source runs uncompiled, and gives the same results: nothing but speed depends on it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES = (
    "chimsim/dispatcher.py",
    "chimsim/engine.py",
    "chimsim/histogram.py",
    "chimsim/idle.py",
    "chimsim/kvcache.py",
    "chimsim/layout.py",
    "chimsim/replay.py",
    "chimsim/simulation.py",
    "chimsim/ticks.py",
    "chimsim/waitqueue.py",
    "traces/graph.py",
)
"""What every simulated call passes through, and no user subclasses but through these modules' own doors."""


class Compiled(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled modules beside their sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the install is editable: an edited source would not be seen behind its old compilation."""
        if version == "editable":
            self.app.display_warning("an editable install is not compiled; leave out -e")
            return
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
        from setuptools.errors import CCompilerError

        before = Path.cwd()
        os.chdir(self.root)
        try:
            # What lies outside is taken as it comes: reading the stubs of pandas and SciPy took seven minutes.
            flags = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
            self._folder = tempfile.TemporaryDirectory(prefix="chimsim-build-")
            modules = mypycify([*flags, *MODULES], opt_level="3", debug_level="0", target_dir=self._folder.name)
            for module in modules:
                # A fused multiply-add rounds once where Python rounds twice: other bytes on some machines.
                module.extra_compile_args.append("-ffp-contract=off")
            command = build_ext(Distribution({"name": "chimsim", "ext_modules": modules}))
            command.build_lib = command.build_temp = self._folder.name
            command.ensure_finalized()
            try:
                command.run()
            except CCompilerError as error:
                self.app.abort(
                    f"chimsim cannot be compiled ({error}): it needs a C compiler; without HATCH_BUILD_HOOKS_ENABLE it "
                    "is installed as it is"
                )
        finally:
            os.chdir(before)
        for name in command.get_outputs():
            build_data["force_include"][name] = os.path.relpath(name, self._folder.name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written: what was compiled can go."""
        if version != "editable":
            self._folder.cleanup()
