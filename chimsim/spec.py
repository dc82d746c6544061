"""What a sweep is to run: read from TOML, from options, or both, and checked where it enters.

Every key that may hold a list multiplies the grid. Nothing is loaded or run here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import isinf, isnan
from pathlib import Path
from typing import Any

from chimsim.errors import ChimsimError, near
from chimsim.failures import parse_outage, parse_slowdown
from chimsim.workers import BACKENDS
from policies import knobs as knobs_of
from policies import policy_class
from traces.files import parse_toml

Scalar = float | int | bool | str | None
Axis = tuple[Scalar, ...]

ROUTERS = ("none", "oracle", "trace")
TRACE = "{trace}"
"""In the folder of a saved model: the name of the trace, so that each of several has models of its own."""
SHUFFLED = "shuffled:"
"""Before another source of confidence: that of other workflows, which knows nothing of this one."""
QUEUES = ("dispatcher", "engine")
SPLITS = ("all", "test")
"""Which workflows of a trace: all, or those that the learned predictors were not trained on."""
OVERSIZE = ("error", "reject", "clip")
GOODPUT = ("ttft", "tpot", "e2el", "latency")


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy of the sweep: its label in tables, its name, and the axes that it has for itself."""

    label: str
    policy: str
    overrides: Mapping[str, Axis] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """A resolved sweep; tuples multiply. Times in seconds, ``rps`` in workflows per second.

    ``slots`` is the dispatcher's ``max_batch_size`` (None: each profile's own); an empty ``router`` means
    the recorded confidence where the trace has one, else the oracle. Numbers among ``router`` and
    ``length_predictor`` are dials (average precision, Kendall distance), other texts folders of saved models.
    ``router_s`` and ``predictor_s`` left empty are what the models' folders say, and 0 without models. All of
    ``fail`` and ``slow`` (`chimsim.failures`) happen in every run: they do not multiply.
    """

    trace: tuple[str, ...]
    policy: tuple[PolicyEntry, ...]
    combo: tuple[str, ...] = ()
    cluster: tuple[str, ...] = ()
    rps: tuple[float, ...] = ()
    knobs: Mapping[str, Axis] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    workflows: int | None = None
    warmup: int = 0
    burstiness: tuple[float, ...] = (1.0,)
    arrivals: str | None = None
    router: tuple[float | str, ...] = ()
    router_map: tuple[float, ...] = ()
    length_predictor: tuple[float | str, ...] = ()
    length_error: tuple[float, ...] = ()
    rank_predictor: tuple[str, ...] = ()
    router_s: tuple[float, ...] = ()
    predictor_s: tuple[float, ...] = ()
    split: str = "all"
    part: str | None = None
    queue: tuple[str, ...] = ("dispatcher",)
    look_ahead: tuple[int, ...] = (0,)
    oversize: str = "error"
    slots: tuple[int | None, ...] = (None,)
    engines: Mapping[str, int] = field(default_factory=dict)
    max_num_seqs: int | None = None
    fail: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    goodput: Mapping[str, float] = field(default_factory=dict)
    workers: int | None = None
    backend: str = "local"
    address: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything that can change a result, ready for `spec_from` again: not who runs it."""
        policies: list[Any] = []
        for entry in self.policy:
            own = {name: list(values) for name, values in entry.overrides.items()}
            plainly = entry.label == entry.policy and not own
            policies.append(entry.policy if plainly else {"label": entry.label, "policy": entry.policy, **own})
        aside = ("policy", "tau", "delta_s", "workers", "backend", "address")
        plain = {name: getattr(self, name) for name in _PARSERS if name not in aside}
        kept = {name: value for name, value in plain.items() if value not in (None, (), {}, (None,))}
        for name, value in kept.items():
            if isinstance(value, tuple):
                kept[name] = list(value)
        if "slots" in kept:
            kept["slots"] = ["profile" if v is None else v for v in self.slots]
        if self.knobs:
            kept["knobs"] = {name: list(values) for name, values in self.knobs.items()}
        return {**kept, "policy": policies}


EXPERIMENT_TABLES = ("experiment", "prepare", "quick", "choose", "relation")
"""What an experiment's file says besides its sweep (`chimsim.reproduce.experiment`)."""


def read_spec(path: str | Path) -> dict[str, Any]:
    """The raw keys of a TOML spec, or of the manifest of an earlier sweep (``manifest.json``).

    Of an experiment's file only its sweep.
    """
    return {key: value for key, value in read_document(path).items() if key not in EXPERIMENT_TABLES}


def read_document(path: str | Path) -> dict[str, Any]:
    """All keys and tables of a spec's file. Raises `ChimsimError` that names what cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ChimsimError(f"spec {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ChimsimError(f"spec {path}: cannot be read ({error})") from error
    try:
        if path.suffix == ".json":
            manifest = json.loads(text)
            if not isinstance(manifest, dict) or not isinstance(manifest.get("spec"), dict):
                raise ChimsimError(f"spec {path}: a JSON spec must be the manifest of a sweep, with a key 'spec'")
            return dict(manifest["spec"])
        return parse_toml(text)
    except ChimsimError:
        raise
    except (ValueError, RecursionError) as error:
        raise ChimsimError(f"spec {path}: {error}") from error


def spec_from(
    options: Mapping[str, Any],
    base: Mapping[str, Any] | None = None,
    *,
    source: str = "",
    dashes: bool = False,
) -> Spec:
    """Build the spec from options over the keys of a file.

    Values may be comma lists in text, lists or single values. ``source`` names the file in messages;
    with ``dashes`` options are named as on the command line (``--delta-s``). Raises `ChimsimError`.
    """
    base = dict(base or {})
    options = {key: value for key, value in options.items() if value is not None}
    where = {key: f"{source}: {key}" if source else key for key in base}
    where |= {key: _dashed(key) if dashes else key for key in options}
    for key in [*base, *options]:
        if key not in _PARSERS:
            raise ChimsimError(f"{where[key]}: unknown key{near(key, list(_PARSERS))}")
    merged = base | options
    merged["knobs"] = _knob_values(base.get("knobs"), where) | _knob_values(options.get("knobs"), where)
    if "policy" in options and isinstance(base.get("policy"), Mapping | list):
        merged["policy"] = _chosen(base["policy"], options["policy"], where["policy"])
    if "combo" in options and "cluster" not in options:
        merged.pop("cluster", None)
    if "cluster" in options and "combo" not in options:
        merged.pop("combo", None)
    parsed: dict[str, Any] = {}
    for key, value in merged.items():
        parsed[key] = _PARSERS[key](value, where.get(key, key))
    knobs = dict(parsed.pop("knobs", {}))
    for name in ("tau", "delta_s"):
        if name in parsed:
            knobs[name] = parsed.pop(name)
    option = _dashed if dashes else str
    if not parsed.get("trace"):
        raise ChimsimError(f"no trace; give {option('trace')}, say apps")
    if not parsed.get("combo") and not parsed.get("cluster"):
        raise ChimsimError(f"no cluster; give {option('combo')} (say qwen1.5b+7b) or {option('cluster')} with a file")
    if not parsed.get("policy"):
        raise ChimsimError(f"no policy; give {option('policy')}, say fcfs,chimera")
    if "policy" in options:
        # The file's knobs were meant for the file's policies.
        for name in knobs.keys() - {*_knob_values(options.get("knobs"), where), *options}:
            if not any(name == knob.name for p in parsed["policy"] for knob in knobs_of(policy_class(p.policy))):
                del knobs[name]
    spec = Spec(knobs=dict(sorted(knobs.items())), **parsed)
    if spec.workflows is not None and spec.warmup >= spec.workflows:
        raise ChimsimError(
            f"{where.get('warmup', 'warmup')}: {spec.warmup} workflows of warm-up leave none of "
            f"{spec.workflows} to measure"
        )
    if spec.arrivals == "poisson" and not spec.rps:
        raise ChimsimError(f"Poisson arrivals need {option('rps')}, in workflows per second")
    if spec.address is not None and spec.backend == "local":
        raise ChimsimError(f"{where['address']} is of a cluster; give {option('backend')} too: ray or dask")
    return spec


def parse_scalar(value: Any) -> Scalar:
    """A knob's value from text: a number (``inf`` too), true/false, else the text itself."""
    if not isinstance(value, str):
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ChimsimError(f"{value!r} is not a number, a text or true/false")
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def scalar_text(value: Scalar) -> str:
    """The value as people read it: a number without trailing zeros, and a dash for none."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-").replace("knobs", "knob")


def _items(value: Any, where: str) -> list[Any]:
    """A comma list, a list or a single value as a list that is not empty."""
    if isinstance(value, str):
        items: list[Any] = [item.strip() for item in value.split(",")]
    elif isinstance(value, Mapping):
        raise ChimsimError(f"{where}: found a table, expected a value or a list")
    elif isinstance(value, Iterable):
        items = list(value)
    else:
        items = [value]
    for item in items:
        if isinstance(item, list | tuple | dict | set):
            raise ChimsimError(f"{where}: found {item!r} inside the list, expected a value")
    if not items or any(isinstance(item, str) and not item for item in items):
        raise ChimsimError(f"{where}: the list is empty or has an empty entry")
    unique = list(dict.fromkeys(items))
    if len(unique) < len(items):
        twice = next(item for item in items if items.count(item) > 1)
        raise ChimsimError(f"{where}: {twice!r} stands there twice")
    return items


def _one(value: Any, where: str) -> Any:
    items = _items(value, where)
    if len(items) > 1:
        raise ChimsimError(f"{where}: takes one value, found {len(items)}")
    return items[0]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ChimsimError(f"{where}: found {value!r}, expected a text")
    return value


def _choice(known: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, where: str) -> str:
        if value not in known:
            hint = near(str(value), list(known))
            raise ChimsimError(f"{where}: {value!r} is unknown; choose from {', '.join(known)}{hint}")
        return str(value)

    return parse


def _noisy(value: Any, most: float, where: str) -> float | None:
    """The number of ``noisy:0.6``, or of a number as it is."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _real(least=0, most=most)(value, where)
    if isinstance(value, str) and value.startswith("noisy:"):
        return _real(least=0, most=most)(value.removeprefix("noisy:"), where)
    return None


def _router(value: Any, where: str) -> float | str:
    """A source of confidence, a dial (``noisy:0.6``), or the folder of a saved router; ``shuffled:`` before one."""
    dial = _noisy(value, 1.0, where)
    if dial is not None:
        return dial
    if isinstance(value, str) and value.startswith(SHUFFLED):
        return f"{SHUFFLED}{_source(value.removeprefix(SHUFFLED), where)}"
    return _source(value, where)


def _source(value: Any, where: str) -> str:
    if isinstance(value, str) and value not in ("", *ROUTERS) and (TRACE in value or Path(value).is_dir()):
        return value
    if isinstance(value, str) and value not in ROUTERS:
        hint = near(value, list(ROUTERS))
        raise ChimsimError(
            f"{where}: {value!r} is unknown; choose from {', '.join(ROUTERS)} or a router's folder, "
            f"or one of these behind shuffled:, or noisy:0.6{hint}"
        )
    return _choice(ROUTERS)(value, where)


def _part_of(value: Any, where: str) -> str:
    """``k/n``: the k-th of n parts of the workflows."""
    number, _, parts = _text(value, where).partition("/")
    short = len(value) < 20
    if not (short and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise ChimsimError(f"{where}: {value!r} is no part of the workflows; expected one such as 1/2")
    return f"{int(number)}/{int(parts)}"


def _length_predictor(value: Any, where: str) -> float | str:
    """``oracle`` (0), a dial (``noisy:0.2``), or ``qrf:FOLDER`` of a saved length model."""
    dial = _noisy(value, 0.5, where)
    if dial is not None:
        return dial
    if value == "oracle":
        return 0.0
    if isinstance(value, str) and value.startswith("qrf:"):
        return value
    raise ChimsimError(f"{where}: {value!r} is unknown; choose from oracle, noisy:0.2, qrf:FOLDER")


def _rank_predictor(value: Any, where: str) -> str:
    """``oracle``, or the folder of a saved rank model."""
    text = _text(value, where)
    if text != "oracle" and TRACE not in text and not Path(text).is_dir():
        raise ChimsimError(f"{where}: {text!r} is unknown; choose oracle or the folder of a rank model")
    return text


def _real(
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    infinite: bool = False,
) -> Callable[[Any, str], float]:
    allowed = f"above {above:g}" if above is not None else f"of at least {least:g}" if least is not None else ""
    allowed += f" and at most {most:g}" if most is not None else ""

    def parse(value: Any, where: str) -> float:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
        except (TypeError, ValueError):
            raise ChimsimError(f"{where}: {value!r} is not a number") from None
        low = (above is not None and number <= above) or (least is not None and number < least)
        high = (most is not None and number > most) or (isinf(number) and not infinite)
        if isnan(number) or low or high:
            raise ChimsimError(f"{where}: {value} is not allowed; give a number {allowed}".rstrip())
        return number

    return parse


def _whole(least: int, most: int = 10**9) -> Callable[[Any, str], int]:
    def parse(value: Any, where: str) -> int:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = int(value)
            if isinstance(value, float) and number != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ChimsimError(f"{where}: {value!r} is not a whole number") from None
        if number < least:
            raise ChimsimError(f"{where}: {value} is not allowed; give a whole number of at least {least}")
        if number > most:
            raise ChimsimError(f"{where}: {value} is too large; give at most {most:,}")
        return number

    return parse


def _slots(value: Any, where: str) -> int | None:
    return None if value is None or value == "profile" else _whole(1)(value, where)


def _listed(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    return lambda value, where: tuple(parse(item, where) for item in _items(value, where))


def _single(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, where: parse(_one(value, where), where)


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    items = _items(value, where)
    if isinstance(value, list | tuple) or len(items) > 1:
        return tuple(_whole(0)(item, where) for item in items)
    return tuple(range(_whole(1, 10_000)(items[0], where)))


def _pairs(parse: Callable[[Any, str], Any], known: tuple[str, ...] = ()) -> Callable[[Any, str], dict[str, Any]]:
    def build(value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            pairs = {str(key): item for key, item in value.items()}
        else:
            pairs = {}
            for item in _items(value, where):
                name, sign, right = str(item).replace(":", "=").partition("=")
                if not sign:
                    raise ChimsimError(f"{where}: {item!r} is not of the form name=value")
                if name.strip() in pairs:
                    raise ChimsimError(f"{where}: {name.strip()!r} stands there twice")
                pairs[name.strip()] = right.strip()
        for name in pairs:
            if known and name not in known:
                raise ChimsimError(f"{where}: {name!r} is unknown; choose from {', '.join(known)}")
        return {name: parse(pairs[name], f"{where}: {name}") for name in sorted(pairs)}

    return build


def _spells(parse: Callable[[str, str], Any]) -> Callable[[Any, str], tuple[str, ...]]:
    """Texts, each of which may be a comma list, as they are: an empty list says that there are none."""

    def check(value: Any, where: str) -> tuple[str, ...]:
        if value in ([], ()):
            return ()
        pieces = [piece for item in _items(value, where) for piece in _text(item, where).split(",")]
        for piece in pieces:
            parse(piece, where)
        return tuple(_items([piece.strip() for piece in pieces], where))

    return check


def _milliseconds(value: Any, where: str) -> Any:
    """A limit in ms: a number, or text with the unit ms or s; of a workflow's latency always with its unit."""
    if where.endswith(": latency") and not str(value).endswith("s"):
        raise ChimsimError(f"{where} is {value!r}; expected a time with its unit, such as 60s")
    if isinstance(value, str) and value.endswith("s"):
        seconds = not value.endswith("ms")
        limit = _real(above=0)(value.removesuffix("s").removesuffix("m").strip(), where)
        return 1000.0 * limit if seconds else limit
    return _real(above=0)(value, where)


def _knob_values(value: Any, where: Mapping[str, str]) -> dict[str, Axis]:
    name_of = where.get("knobs", "knobs")
    if value is None:
        return {}
    if isinstance(value, Mapping):
        pairs = {str(name): item for name, item in value.items()}
    else:
        pairs = {}
        for text in value if isinstance(value, list | tuple) else [value]:
            name, sign, right = str(text).partition("=")
            if not sign or not name.strip():
                raise ChimsimError(f"{name_of}: {text!r} is not of the form name=value or name=value,value")
            pairs[name.strip()] = right
    return {name: tuple(map(parse_scalar, _items(item, f"{name_of}: {name}"))) for name, item in pairs.items()}


def _policies(value: Any, where: str) -> tuple[PolicyEntry, ...]:
    """A list of names and tables, or tables by label (``[policy.stjf]``)."""
    if isinstance(value, Mapping):
        entries = [_policy(label, table, f"{where}.{label}") for label, table in value.items()]
    elif isinstance(value, list | tuple):
        entries = [
            _policy("", item, f"{where}[{number}]") if isinstance(item, Mapping) else _named(item, where)
            for number, item in enumerate(value)
        ]
    else:
        entries = [_named(item, where) for item in _items(value, where)]
    if not entries:
        raise ChimsimError(f"{where}: the list is empty or has an empty entry")
    labels = [entry.label for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ChimsimError(f"{where}: {label!r} stands there twice; give each entry its own label")
    return tuple(entries)


def _named(name: Any, where: str) -> PolicyEntry:
    text = _text(name, where).strip()
    if not text:
        raise ChimsimError(f"{where}: the list is empty or has an empty entry")
    return PolicyEntry(text, text)


def _policy(label: str, table: Any, where: str) -> PolicyEntry:
    if not isinstance(table, Mapping):
        raise ChimsimError(f"{where}: found {table!r}, expected a table (may be empty)")
    name = _text(table.get("policy", label or table.get("label", "")), f"{where}.policy")
    overrides = {}
    for key in sorted(table):
        if key not in ("policy", "label"):
            parse = _PARSERS[key] if key in (*POLICY_AXES, "tau", "delta_s") else _listed(_plain_scalar)
            overrides[str(key)] = parse(table[key], f"{where}.{key}")
    return PolicyEntry(_text(table.get("label", label or name), f"{where}.label"), name, overrides)


def _plain_scalar(value: Any, where: str) -> Scalar:
    return parse_scalar(value)


def _chosen(base: Any, names: Any, where: str) -> Any:
    """The file's entries of the named policies, with their overrides; a name it lacks stands for itself."""
    if isinstance(names, list | tuple) and any(isinstance(name, Mapping) for name in names):
        return names
    known = {entry.label: entry for entry in _policies(base, where)}
    chosen: list[Any] = []
    for name in _items(names, where):
        entry = known.get(name)
        own = {"label": entry.label, "policy": entry.policy, **entry.overrides} if entry is not None else name
        chosen.append(own)
    return chosen


POLICY_AXES = (
    "router", "router_map", "length_predictor", "length_error", "rank_predictor", "router_s", "predictor_s", "queue",
    "look_ahead", "fail", "slow",
)  # fmt: skip
"""Axes that a policy's table may set for itself, besides its knobs."""

_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "trace": _listed(_text),
    "combo": _listed(_text),
    "cluster": _listed(_text),
    "policy": _policies,
    "rps": _listed(_real(above=0)),
    "tau": _listed(_real(least=0, infinite=True)),
    "delta_s": _listed(_real(least=0, infinite=True)),
    "knobs": lambda value, _: value,
    "seeds": _seeds,
    "workflows": _single(_whole(1)),
    "warmup": _single(_whole(0)),
    "burstiness": _listed(_real(above=0)),
    "arrivals": _single(_text),
    "router": _listed(_router),
    "router_map": _listed(_real(above=0, most=1)),
    "length_predictor": _listed(_length_predictor),
    "rank_predictor": _listed(_rank_predictor),
    "split": _single(_choice(SPLITS)),
    "part": _single(_part_of),
    "length_error": _listed(_real(least=0, most=0.5)),
    "router_s": _listed(_real(least=0)),
    "predictor_s": _listed(_real(least=0)),
    "queue": _listed(_choice(QUEUES)),
    "look_ahead": _listed(_whole(0)),
    "oversize": _single(_choice(OVERSIZE)),
    "slots": _listed(_slots),
    "engines": _pairs(_whole(1)),
    "max_num_seqs": _single(_whole(1)),
    "fail": _spells(parse_outage),
    "slow": _spells(parse_slowdown),
    "goodput": _pairs(_milliseconds, GOODPUT),
    "workers": _single(_whole(1)),
    "backend": _single(_choice(BACKENDS)),
    "address": _single(_text),
}
SPEC_KEYS = tuple(_PARSERS)
"""The keys that a sweep's file may have."""
