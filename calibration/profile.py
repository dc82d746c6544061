"""Finding and reading engine profiles: the shipped ones by model or alias, and your own files.

What a profile is and how it is evaluated is in `calibration.engine_profile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from calibration.curves import CURVES
from calibration.engine_profile import EngineProfile, ProvenanceRow
from calibration.figures import Figure, ProfileError, Provenance, near, read_figures

__all__ = [
    "PROFILES",
    "EngineProfile",
    "Figure",
    "ProfileError",
    "Provenance",
    "ProvenanceRow",
    "find_profile",
    "load_profile",
]


def _plain(name: str) -> str:
    """A name as it is compared: no case, hyphens, blanks, organisation before or "Instruct" after it."""
    bare = name.strip().lower().rsplit("/", 1)[-1]
    for character in "-_ ":
        bare = bare.replace(character, "")
    return bare.removesuffix("instruct")


class _Shipped(Mapping[str, EngineProfile]):
    """The profiles in ``calibration/profiles``, read at first use."""

    @cached_property
    def _by_model(self) -> dict[str, EngineProfile]:
        found: dict[str, EngineProfile] = {}
        for entry in sorted(files("calibration").joinpath("profiles").iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".toml"):
                profile = _parse(entry.read_text(encoding="utf-8"), f"calibration/profiles/{entry.name}")
                if profile.model in found:
                    raise ProfileError(f"calibration/profiles/{entry.name}: a second profile of {profile.model!r}")
                found[profile.model] = profile
        return dict(sorted(found.items(), key=lambda item: (item[1].parameters, item[0])))

    @cached_property
    def names(self) -> dict[str, str]:
        """Model by plain name, aliases included."""
        names: dict[str, str] = {}
        for model, profile in self._by_model.items():
            for name in (model, *profile.aliases):
                if names.setdefault(_plain(name), model) != model:
                    raise ProfileError(f"profiles: {name!r} names both {names[_plain(name)]!r} and {model!r}")
        return names

    def __getitem__(self, model: str) -> EngineProfile:
        return self._by_model[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_model)

    def __len__(self) -> int:
        return len(self._by_model)


_SHIPPED = _Shipped()
PROFILES: Mapping[str, EngineProfile] = _SHIPPED
"""The shipped profiles by model, smallest first."""


def find_profile(name: str) -> EngineProfile:
    """The shipped profile of that model or alias, in any case. Raises `ProfileError` with near names."""
    model = _SHIPPED.names.get(_plain(name))
    if model is None:
        aliases = [alias for profile in PROFILES.values() for alias in profile.aliases]
        raise ProfileError(f"no profile for model {name!r}{near(name, PROFILES, aliases)}")
    return PROFILES[model]


def load_profile(name_or_path: str | Path) -> EngineProfile:
    """A shipped profile by model or alias, or the profile in a TOML file. Raises `ProfileError`."""
    path = Path(name_or_path)
    try:
        named = isinstance(name_or_path, str) and path.suffix != ".toml" and not path.is_file()
        text = "" if named else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such profile file{near(str(name_or_path), PROFILES)}") from None
    except (OSError, ValueError) as error:  # also for names that no file can have
        raise ProfileError(f"{str(path)[:200]}: cannot be read: {error}") from None
    return find_profile(str(name_or_path)) if named else _parse(text, str(path))


def _parse(text: str, where: str) -> EngineProfile:
    content = read_figures(text, where)
    try:
        curves = {key: CURVES[key].read(content[key]) for key in CURVES if key in content}
        return EngineProfile(**{**content, **curves})
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None
