"""A generator of traces: one latent difficulty a workflow drives labels, lengths, stages and words.

The model, for workflow i of difficulty d ~ N(0, 1), model m and stage s (all numbers in the parameter file):

- solved: with probability sigmoid(ability[m] - slope * d), ability such that the mean is ``solved_rate``;
- stages: a pattern of roles, some of which may work side by side, drawn with weights that depend on d; a check
  that finds fault adds a stage;
- output tokens: ``median_tokens[role] * length_factor[m] * exp(difficulty * d + unsolved * [not solved]
  + workflow_spread * W + model_spread * M + spread * E)``, W a normal of the workflow (shared by its
  models and stages), M one of the workflow on this model, E one of the stage;
- repetition loops: a declared share of the workflows, unsolved ones only, more often hard ones, runs into the
  output cap in the working role;
- the prompt's words follow ``words_tell * d + sqrt(1 - words_tell^2) * noise``;
- confidence: the exact posterior P(solved | d + router_noise * noise), hence calibrated. It knows how hard a
  task is and nothing of whom it suits, as is the case with real routers.

Marginals are drawn stratified (each of n equal slices of the unit interval once, in random order), so that a
trace of some thousand workflows has the declared rates closely; the draws depend on n, therefore.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, ndtri

from traces.files import digest_of
from traces.graph import longest
from traces.parameters import Parameters, Role
from traces.prompts import estimate_tokens, write_prompt
from traces.schema import Run, SharedPrefix, Stage, Trace, TraceError, Workflow

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(61)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def generate(parameters: Parameters, seed: int | None = None, workflows: int | None = None) -> Trace:
    """A trace of ``workflows`` workflows without arrival times; the same arguments give the same trace.

    Both default to what the parameters say. Raises `TraceError`.
    """
    seed = parameters.seed if seed is None else seed
    n = parameters.workflows if workflows is None else workflows
    if seed < 0 or n < 1:
        raise TraceError(f"expected seed >= 0 and workflows >= 1, found seed {seed} and workflows {n}")
    draw = _Draws(seed, n)
    difficulty = draw.normal("difficulty")
    tell = parameters.words_tell
    shown = tell * difficulty + np.sqrt(1.0 - tell**2) * draw.normal("words")
    observed = difficulty + parameters.router_noise * draw.normal("router")
    patterns = _patterns(parameters, difficulty, draw.uniform("pattern"))
    shared = parameters.workflow_spread * draw.normal("length")
    text = draw.stream("text")
    prompts = [write_prompt(parameters.templates, float(shown[i]), text) for i in range(n)]
    user_tokens = [estimate_tokens(prompt) for prompt in prompts]

    runs: list[dict[str, Run]] = [{} for _ in range(n)]
    confidence: list[dict[str, float]] = [{} for _ in range(n)]
    for name, model in parameters.models.items():
        ability = _ability(model.solved_rate, parameters.slope)
        solved = draw.uniform(f"solved {name}") < expit(ability - parameters.slope * difficulty)
        fault_rate = np.where(solved, parameters.check.fails_when_solved, parameters.check.fails_when_unsolved)
        loops = _systematic(
            np.where(solved, 0.0, np.exp(parameters.loop_tilt * difficulty)), model.loop_rate * n, draw, name
        )
        fault = (draw.uniform(f"check {name}") < fault_rate) | loops
        trusted = _posterior(ability, parameters, observed)
        log_length = np.log(model.length_factor) + shared + parameters.model_spread * draw.normal(f"run {name}")
        noise = np.stack([draw.normal(f"stage {s} {name}") for s in range(_longest(parameters))])
        for i in range(n):
            groups = list(parameters.patterns[patterns[i]].roles)
            if groups[-1] == (parameters.check.by,) and fault[i]:
                groups.append((parameters.check.repeats,))
            roles = [role for group in groups for role in group]
            outputs = [
                _output_tokens(parameters.roles[role], log_length[i], difficulty[i], solved[i], noise[s, i])
                for s, role in enumerate(roles)
            ]
            if loops[i]:
                outputs[_loop_stage(roles, parameters.loops_in)] = parameters.output_cap_tokens
            runs[i][name] = Run(_stages(parameters, groups, outputs, user_tokens[i]), bool(solved[i]))
            confidence[i][name] = round(float(trusted[i]), 4)

    made = tuple(
        Workflow(
            workflow_id=f"{parameters.workload}-{i:06d}",
            workload=parameters.workload,
            runs=runs[i],
            prompt=prompts[i],
            confidence=confidence[i],
        )
        for i in range(n)
    )
    return Trace(parameters.workload, made, digest_of(made))


class _Draws:
    """Stratified draws of length n; one named random stream each, so that adding one moves no other."""

    def __init__(self, seed: int, n: int) -> None:
        self.seed = seed
        self.n = n

    def stream(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])

    def uniform(self, name: str) -> Floats:
        rng = self.stream(name)
        order = np.argsort(rng.random(self.n), kind="stable")
        drawn: Floats = np.clip((order + rng.random(self.n)) / self.n, 1e-12, 1.0 - 1e-12)
        return drawn

    def normal(self, name: str) -> Floats:
        drawn: Floats = ndtri(self.uniform(name))
        return drawn


def _ability(solved_rate: float, slope: float) -> float:
    """The ability a with E[sigmoid(a - slope * d)] = ``solved_rate`` over d ~ N(0, 1)."""
    return float(brentq(lambda a: float(_WEIGHTS @ expit(a - slope * _NODES)) - solved_rate, -200.0, 200.0, xtol=1e-12))


def _posterior(ability: float, parameters: Parameters, observed: Floats) -> Floats:
    """P(solved | o = d + noise): d given o is normal with mean o / (1 + v) and variance v / (1 + v)."""
    variance = parameters.router_noise**2
    mean = observed / (1.0 + variance)
    spread = np.sqrt(variance / (1.0 + variance))
    posterior: Floats = expit(ability - parameters.slope * (mean[:, None] + spread * _NODES)) @ _WEIGHTS
    return np.clip(posterior, 0.0, 1.0)


def _patterns(parameters: Parameters, difficulty: Floats, uniform: Floats) -> npt.NDArray[np.int64]:
    weights = np.stack([p.weight * np.exp(p.tilt * difficulty) for p in parameters.patterns])
    edges = np.cumsum(weights, axis=0) / weights.sum(axis=0)
    chosen: npt.NDArray[np.int64] = (uniform >= edges[:-1]).sum(axis=0)
    return chosen


def _systematic(weights: Floats, expected: float, draw: _Draws, name: str) -> Bools:
    """Systematic sampling: pick ``expected`` (up to rounding) of n, chances in proportion to ``weights``."""
    total = weights.sum()
    if not total or not expected:
        return np.zeros(draw.n, dtype=np.bool_)
    chances = np.minimum(1.0, weights * (expected / total))
    marks = np.floor(np.cumsum(chances) + draw.stream(f"loop {name}").random())
    return np.diff(marks, prepend=0.0) >= 1.0


def _output_tokens(role: Role, log_length: float, difficulty: float, solved: bool, noise: float) -> int:
    exponent = log_length + role.difficulty * difficulty + role.spread * noise
    if not solved:
        exponent += role.unsolved
    return max(1, round(float(role.median_tokens * np.exp(exponent))))


def _loop_stage(roles: list[str], working: str) -> int:
    return roles.index(working) if working in roles else len(roles) - 1


def _longest(parameters: Parameters) -> int:
    return max(sum(map(len, pattern.roles)) for pattern in parameters.patterns) + 1


def _stages(
    parameters: Parameters, groups: Sequence[Sequence[str]], outputs: Sequence[int], user: int
) -> tuple[Stage, ...]:
    """The calls of one run, with the outputs cut to the cap and the context.

    A stage's prompt holds the task and at most ``carry_tokens`` (the first ones) of each earlier group's outputs.
    Role first: the role's own system prompt leads, so only calls of the same role begin alike. History
    first: one common system prompt, then everything so far, then the role's instruction.
    """
    stages: list[Stage] = []
    said = 0
    parents: tuple[int, ...] = ()
    remaining = iter(outputs)
    for group in groups:
        first = len(stages)
        for name in group:
            stages.append(_stage(parameters, name, next(remaining), user, said, stages, parents))
        parents = tuple(range(first, len(stages)))
        said += sum(_carried(parameters, stages[index]) for index in parents)
    return tuple(stages)


def _carried(parameters: Parameters, stage: Stage) -> int:
    """What later prompts hold of the stage's output, with what is around it."""
    return min(stage.output_tokens, parameters.carry_tokens) + parameters.glue_tokens


def _stage(
    parameters: Parameters,
    name: str,
    output: int,
    user: int,
    said: int,
    stages: Sequence[Stage],
    parents: tuple[int, ...],
) -> Stage:
    """The next stage after ``stages``, of which it waits for ``parents``; ``said`` tokens are of earlier outputs."""
    role = parameters.roles[name]
    parent = longest(stages, parents)
    reused = 0
    if parameters.layout == "role-first":
        system = role.system_tokens
        prompt = system + user + said
        prefix = SharedPrefix(f"{parameters.workload}-{name}", system)
        if parent is not None and stages[parent].name == name:
            reused = stages[parent].prompt_tokens
    else:
        system = parameters.common_system_tokens
        prefix = SharedPrefix(f"{parameters.workload}-system", system)
        prompt = system + user
        if parent is not None:
            reused = stages[parent].prompt_tokens + min(stages[parent].output_tokens, parameters.carry_tokens)
            prompt = reused + sum(_carried(parameters, stages[index]) for index in parents if index != parent)
        prompt += role.instruction_tokens
    room = parameters.context_tokens - prompt
    if room < 1:
        raise TraceError(f"a prompt of {prompt} tokens does not fit context_tokens = {parameters.context_tokens}")
    before = tuple(range(len(stages)))[-1:]
    return Stage(
        name=name,
        prompt_tokens=prompt,
        output_tokens=min(output, parameters.output_cap_tokens, room),
        reused_tokens=reused,
        system_tokens=system,
        user_tokens=prompt - system,
        shared_prefix=prefix,
        after=None if parents == before else parents,
    )
