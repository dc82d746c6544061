"""Which engines there are: combinations (``qwen1.5b+7b``) and cluster files, made into checked values.

It resolves names and defaults once; nothing is left open for the simulator to guess.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from calibration.profile import PROFILES, EngineProfile, ProfileError, find_profile, load_profile
from calibration.scaling import tensor_parallel
from chimsim.errors import ChimsimError, near
from traces.files import parse_toml

Scheduling = Literal["fcfs", "priority"]

MAX_ENGINES = 10_000
"""Of one entry: more are taken for a slip of the keyboard."""
MAX_BLOCK_TOKENS = 65_536
_SIZED = re.compile(r"(.*?)(\d+(?:\.\d+)?b)", re.IGNORECASE)
_COUNTED = re.compile(r"(.+b)x(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a running engine answers, for live runs; the simulator never looks at it.

    ``api_key_env`` names the environment variable that holds its key, ``launch`` is the command that starts it.
    """

    url: str
    served_model: str
    api_key_env: str = ""
    launch: str = ""

    @property
    def api_key(self) -> str | None:
        """The key, from the environment; None where it names no variable, or one that is not set."""
        return os.environ.get(self.api_key_env) if self.api_key_env else None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine as it is started: a model, its profile, and vLLM's settings.

    ``num_kv_blocks`` counts all blocks, the one that vLLM reserves too, so one less can be used.
    ``max_batch_size`` is how many requests the dispatcher lets into the engine. Raises `ChimsimError`.
    """

    name: str
    model: str
    profile: EngineProfile
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    max_batch_size: int
    max_model_len: int
    block_tokens: int = 16
    scheduling: Scheduling = "fcfs"
    prefix_caching: bool = True
    address: Address | None = None

    def __post_init__(self) -> None:
        for field in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_kv_blocks",
            "max_batch_size",
            "max_model_len",
            "block_tokens",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ChimsimError(f"engine {self.name!r}: {field} is {value!r}; expected a whole number above 0")
        if self.block_tokens > MAX_BLOCK_TOKENS:
            raise ChimsimError(
                f"engine {self.name!r}: block_tokens is {self.block_tokens}; expected at most {MAX_BLOCK_TOKENS:,}"
            )
        if self.num_kv_blocks < 2:
            raise ChimsimError(
                f"engine {self.name!r}: KV memory of {self.num_kv_blocks} block; "
                f"expected at least 2 ({2 * self.block_tokens} tokens), because one is reserved"
            )
        if self.max_batch_size > self.max_num_seqs:
            raise ChimsimError(
                f"engine {self.name!r}: max_batch_size (slots) is {self.max_batch_size}; "
                f"expected at most max_num_seqs ({self.max_num_seqs})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ChimsimError(
                f"engine {self.name!r}: max_num_batched_tokens is {self.max_num_batched_tokens}; "
                f"expected at least max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )
        if self.scheduling not in get_args(Scheduling):
            raise ChimsimError(
                f"engine {self.name!r}: scheduling is {self.scheduling!r}; expected fcfs or priority"
                f"{near(str(self.scheduling), get_args(Scheduling))}"
            )
        if type(self.prefix_caching) is not bool:
            raise ChimsimError(
                f"engine {self.name!r}: prefix_caching is {self.prefix_caching!r}; expected true or false"
            )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of all KV blocks."""
        return self.num_kv_blocks * self.block_tokens

    @property
    def decode_s_per_token(self) -> float:
        """The profile's decode step time at ``max_batch_size``, which is what policies see."""
        return self.profile.decode_s_per_token(self.max_batch_size)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but seldom meant."""
        found = []
        mean_tokens = self.profile.mean_call_tokens
        needed = self.max_batch_size * mean_tokens
        if needed > self.num_kv_tokens:
            found.append(
                f"engine {self.name!r}: {self.max_batch_size} slots of {mean_tokens:,.0f} tokens "
                f"need {needed:,.0f} KV tokens and {self.num_kv_tokens:,} are there: expect preemptions"
            )
        if self.max_model_len > self.num_kv_tokens - self.block_tokens:
            found.append(
                f"engine {self.name!r}: max_model_len is {self.max_model_len:,}, more than KV memory holds "
                f"({self.num_kv_tokens - self.block_tokens:,} tokens); vLLM would refuse to start"
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the profile by its digest, the address left out: it changes no result."""
        profile = self.profile
        return {
            "name": self.name,
            "model": self.model,
            "profile": {
                "model": profile.model,
                "gpu": profile.gpu,
                "gpus": profile.gpus,
                "digest": profile.digest,
            },
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_kv_blocks": self.num_kv_blocks,
            "max_batch_size": self.max_batch_size,
            "max_model_len": self.max_model_len,
            "block_tokens": self.block_tokens,
            "scheduling": self.scheduling,
            "prefix_caching": self.prefix_caching,
        }


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engines of a run, in order of their names, which are distinct. Raises `ChimsimError`."""

    name: str
    engines: tuple[EngineSpec, ...]

    def __post_init__(self) -> None:
        if not self.engines:
            raise ChimsimError(f"cluster {self.name!r} has no engine; expected at least one")
        twice = [name for name, count in Counter(engine.name for engine in self.engines).items() if count > 1]
        if twice:
            raise ChimsimError(f"cluster {self.name!r}: two engines are named {twice[0]!r}; expected distinct names")
        object.__setattr__(self, "engines", tuple(sorted(self.engines, key=lambda engine: engine.name)))

    @property
    def models(self) -> tuple[str, ...]:
        """The models served, in order."""
        return tuple(sorted({engine.model for engine in self.engines}))

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of all engines; engines that differ only in their names warn once."""
        alike = {replace(engine, name=""): engine for engine in reversed(self.engines)}
        return tuple(warning for engine in reversed(alike.values()) for warning in engine.warnings)

    def addressed(self) -> list[tuple[EngineSpec, Address]]:
        """Every engine with where it answers. Raises `ChimsimError` for one that does not say."""
        found = []
        for spec in self.engines:
            if spec.address is None:
                raise ChimsimError(
                    f"cluster {self.name}: engine {spec.name} has no url; expected url = ... in its table"
                )
            found.append((spec, spec.address))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: everything of the cluster that can change a result."""
        return {"name": self.name, "engines": [engine.to_dict() for engine in self.engines]}


def combo_cluster(
    combo: str,
    *,
    engines: Mapping[str, int] | None = None,
    max_batch_size: int | Mapping[str, int] | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_caching: bool = True,
    scheduling: Scheduling = "fcfs",
) -> Cluster:
    """A cluster of shipped profiles, models joined by ``+``; a bare size inherits the family before it.

    ``engines`` is how many engines a model has (default 1; ``qwen7bx2`` in the combination says the same),
    ``max_batch_size`` the slots of every engine or by model; a model that is not named keeps its own. The
    cluster's name is canonical: ``"QWEN7B+1.5b"`` becomes ``"qwen1.5b+7b"``.

    >>> [engine.name for engine in combo_cluster("qwen1.5b+7b", engines={"qwen7b": 2}).engines]
    ['Qwen2.5-1.5B', 'Qwen2.5-7B/0', 'Qwen2.5-7B/1']
    """
    counts = _parse_combo(combo)
    for model, count in _by_model(engines or {}, counts, combo, "engines").items():
        counts[model] = _count(count, f"{combo!r}: engines of {model}")
    if isinstance(max_batch_size, Mapping):
        slots = _by_model(max_batch_size, counts, combo, "slots")
    else:
        slots = {} if max_batch_size is None else dict.fromkeys(counts, max_batch_size)
    specs = []
    for model, count in counts.items():
        for name in numbered(model, count):
            specs.append(
                _engine(
                    name,
                    model,
                    PROFILES[model],
                    max_batch_size=slots.get(model),
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    prefix_caching=prefix_caching,
                    scheduling=scheduling,
                )
            )
    return Cluster(_combo_name(counts), tuple(specs))


def combo_models(combo: str) -> tuple[str, ...]:
    """The models of a combination, in the order of the cluster. Raises `ChimsimError`."""
    return tuple(sorted(_parse_combo(combo)))


def engines_by_combo(combos: Iterable[str], engines: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """For each combination the counts that are for its models. Raises `ChimsimError` for a name in none of them."""
    models = {combo: combo_models(combo) for combo in combos}
    known = [model for served in models.values() for model in served]
    counts = _by_model(engines, known, "+".join(models) if len(models) == 1 else "all combinations", "engines")
    return {combo: {model: counts[model] for model in served if model in counts} for combo, served in models.items()}


def load_cluster(
    path_or_combo: str | Path,
    *,
    engines: Mapping[str, int] | None = None,
    max_batch_size: int | Mapping[str, int] | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_caching: bool | None = None,
    scheduling: Scheduling | None = None,
) -> Cluster:
    """A cluster from a TOML file or a combination; what is given here goes before what the file says.

    Raises `ChimsimError` or `ProfileError`, naming the file, the engine and the key.
    """
    given: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefix_caching": prefix_caching,
        "scheduling": scheduling,
    }
    given = {name: value for name, value in given.items() if value is not None}
    path = Path(path_or_combo)
    if isinstance(path_or_combo, str) and path.suffix != ".toml" and not path.is_file():
        return combo_cluster(path_or_combo, engines=engines, max_batch_size=max_batch_size, **given)
    if engines:
        raise ChimsimError(f"{path}: the number of engines stands in the file (count = ...); leave engines out")
    return _read_cluster(path, max_batch_size, given)


_ENGINE_KEYS = (
    "model", "profile", "gpu", "count", "name", "max_batch_size", "max_num_seqs", "max_num_batched_tokens",
    "num_kv_tokens", "max_model_len", "tensor_parallel", "prefix_caching", "scheduling", "url", "served_model",
    "api_key_env", "launch",
)  # fmt: skip


def _read_cluster(path: Path, slots: int | Mapping[str, int] | None, given: Mapping[str, Any]) -> Cluster:
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ChimsimError(f"{path}: no such cluster file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChimsimError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ChimsimError(f"{path}: not valid TOML: {error}") from None
    _only(tree, ("name", "engine"), str(path))
    name = tree.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise ChimsimError(f"{path}: name is {name!r}; expected a name in quotes")
    tables = tree.get("engine", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ChimsimError(f"{path}: engine is {tables!r}; expected tables that begin with [[engine]]")
    if not tables:
        raise ChimsimError(f"{path}: no [[engine]]; expected at least one")
    entries = [_Entry.read(table, f"{path}: engine {number}", path) for number, table in enumerate(tables, 1)]
    if isinstance(slots, Mapping):
        by_model = _by_model(slots, [entry.model for entry in entries], str(path), "slots")
    else:
        by_model = {} if slots is None else {entry.model: slots for entry in entries}
    unnamed = Counter[str]()
    for entry in entries:
        if entry.name is None:
            unnamed[entry.model] += entry.count
    names = {model: iter(numbered(model, count)) for model, count in unnamed.items()}
    specs = []
    for entry in entries:
        own = names[entry.model] if entry.name is None else iter(numbered(entry.name, entry.count))
        for number in range(entry.count):
            settings = {**entry.settings, **given}
            if entry.addresses:
                settings["address"] = entry.addresses[number]
            if entry.model in by_model:
                settings["max_batch_size"] = by_model[entry.model]
            try:
                specs.append(_engine(next(own), entry.model, entry.profile, **settings))
            except ChimsimError as error:
                raise ChimsimError(f"{entry.where}: {error}") from None
    try:
        return Cluster(name, tuple(specs))
    except ChimsimError as error:
        raise ChimsimError(f"{path}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One [[engine]] of a file: ``count`` engines alike."""

    where: str
    model: str
    name: str | None
    count: int
    profile: EngineProfile
    settings: Mapping[str, Any]
    addresses: tuple[Address, ...] = ()

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str, path: Path) -> _Entry:
        _only(table, _ENGINE_KEYS, where)
        for key in ("model", "profile", "gpu", "name", "scheduling", "served_model", "api_key_env", "launch"):
            if key in table and (not isinstance(table[key], str) or not table[key].strip()):
                raise ChimsimError(f"{where}: {key} is {table[key]!r}; expected a name in quotes")
        if "model" not in table and "profile" not in table:
            raise ChimsimError(f"{where}: names no model; expected model = ... or profile = ...")
        try:
            profile = _profile(table.get("profile", table.get("model")), path)
            if "tensor_parallel" in table:
                gpus = _at_least_one(table["tensor_parallel"], f"{where}: tensor_parallel")
                profile = tensor_parallel(profile, gpus)
        except ProfileError as error:
            raise ChimsimError(f"{where}: {error}") from None
        if "gpu" in table and table["gpu"].lower() != profile.gpu.lower():
            raise ChimsimError(
                f"{where}: gpu is {table['gpu']!r}, but {profile.model}'s profile is of {profile.gpu!r}; "
                "expected the same, or profile = the file of another profile"
            )
        wanted = (
            "max_batch_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_kv_tokens",
            "max_model_len",
        )
        settings = {key: _at_least_one(table[key], f"{where}: {key}") for key in wanted if key in table}
        settings |= {key: table[key] for key in ("prefix_caching", "scheduling") if key in table}
        model = profile.model
        if "profile" in table and "model" in table:
            model = _canonical(table["model"])
        count = _count(table.get("count", 1), f"{where}: count")
        addresses = _addresses(table, where, model, count)
        return cls(where, model, table.get("name"), count, profile, settings, addresses)


def _addresses(table: Mapping[str, Any], where: str, model: str, count: int) -> tuple[Address, ...]:
    """Of each of the entry's engines, where it says so: one URL, or a list of as many as there are engines."""
    if "url" not in table:
        for key in ("served_model", "api_key_env", "launch"):
            if key in table:
                raise ChimsimError(f'{where}: has {key} but no url; expected url = "http://host:port"')
        return ()
    urls = table["url"] if isinstance(table["url"], list) else [table["url"]]
    for url in urls:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ChimsimError(f"{where}: url is {url!r}; expected http://host:port")
    if len(urls) != count:
        raise ChimsimError(f"{where}: {len(urls)} urls for {count} engines; expected as many")
    rest = (table.get("served_model", model), table.get("api_key_env", ""), table.get("launch", ""))
    return tuple(Address(url, *rest) for url in urls)


def _profile(named: str, path: Path) -> EngineProfile:
    """A shipped profile by name; a file is looked for beside the cluster file."""
    beside = path.parent / named
    return load_profile(beside if named.endswith(".toml") else named)


def _engine(
    name: str,
    model: str,
    profile: EngineProfile,
    *,
    max_batch_size: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_kv_tokens: int | None = None,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    scheduling: Scheduling = "fcfs",
    address: Address | None = None,
) -> EngineSpec:
    """The profile's defaults where nothing is stated; unstated slots follow memory and ``max_num_seqs``."""
    seqs = profile.max_num_seqs if max_num_seqs is None else max_num_seqs
    tokens = profile.num_kv_tokens if num_kv_tokens is None else num_kv_tokens
    slots = max_batch_size
    if slots is None:
        slots = max(1, min(seqs, int(tokens // profile.mean_call_tokens)))
    return EngineSpec(
        name=name,
        model=model,
        profile=profile,
        max_num_seqs=seqs,
        max_num_batched_tokens=(
            profile.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
        ),
        num_kv_blocks=tokens // profile.block_tokens,
        max_batch_size=slots,
        max_model_len=profile.max_model_len if max_model_len is None else max_model_len,
        block_tokens=profile.block_tokens,
        scheduling=scheduling,
        prefix_caching=prefix_caching,
        address=address,
    )


def _parse_combo(combo: str) -> dict[str, int]:
    """How many engines of each model a combination names."""
    counts: dict[str, int] = {}
    family = ""
    for part in combo.split("+"):
        word, count = part.strip(), 1
        counted = _COUNTED.fullmatch(word)
        if counted:
            word, count = counted[1], int(counted[2])
        sized = _SIZED.fullmatch(word)
        if sized and not sized[1]:
            word = family + word
        elif sized:
            family = sized[1]
        if not word:
            raise ChimsimError(f"combination {combo!r} has an empty part; expected names joined by +, say qwen1.5b+7b")
        try:
            model = find_profile(word).model
        except ProfileError as error:
            raise ChimsimError(f"combination {combo!r}: {error}") from None
        if model in counts:
            raise ChimsimError(
                f"combination {combo!r} names {model} twice; for several engines write {_short(model)}x2"
            )
        counts[model] = _count(count, f"combination {combo!r}: engines of {model}")
    return counts


def _combo_name(counts: Mapping[str, int]) -> str:
    """The canonical name: smallest model first, a family said once, ``x2`` for two engines."""
    parts: list[str] = []
    family = ""
    for model in sorted(counts, key=lambda model: (PROFILES[model].parameters, model)):
        short = _short(model)
        sized = _SIZED.fullmatch(short)
        part = sized[2] if sized and parts and sized[1] == family else short
        family = sized[1] if sized else ""
        parts.append(part + (f"x{counts[model]}" if counts[model] > 1 else ""))
    return "+".join(parts)


def _short(model: str) -> str:
    """The first alias, which is the one for the command line."""
    return (*PROFILES[model].aliases, model)[0]


def _canonical(name: str) -> str:
    try:
        return find_profile(name).model
    except ProfileError:
        return name


def _by_model(values: Mapping[str, int], known: Iterable[str], where: str, what: str) -> dict[str, int]:
    """The values with their keys, models or aliases, made canonical."""
    models = sorted(set(known))
    found: dict[str, int] = {}
    for name, value in values.items():
        model = name if name in models else _canonical(name)
        if model not in models:
            names = [*models, *(_short(model) for model in models if model in PROFILES)]
            hint = near(name, names)
            raise ChimsimError(f"{where}: {what} of {name!r}, but the models are {', '.join(models)}{hint}")
        if model in found:
            raise ChimsimError(f"{where}: {what} of {model} are given twice")
        found[model] = value
    return found


def numbered(name: str, count: int) -> list[str]:
    """What so many engines of one name are called: one of a kind keeps it."""
    return [name] if count == 1 else [f"{name}/{number}" for number in range(count)]


def _at_least_one(value: object, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ChimsimError(f"{what} is {value!r}; expected a whole number above 0")
    return value


def _count(value: object, what: str) -> int:
    """A number of engines."""
    count = _at_least_one(value, what)
    if count > MAX_ENGINES:
        raise ChimsimError(f"{what} is {count:,}; expected at most {MAX_ENGINES:,}")
    return count


def _only(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            hint = near(key, known) or f"; known: {', '.join(known)}"
            raise ChimsimError(f"{where}: unknown key {key!r}{hint}")
