"""The activity monitor: one entry a workflow, and sums that come back to exactly nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.activity import Activity

ENGINES = ("a", "b")


def test_an_entry_is_replaced_when_a_stage_starts_and_removed_when_the_workflow_ends() -> None:
    activity = Activity()
    activity.start("w", "a", 500)
    activity.start("v", "a", 40)
    activity.start("w", "a", 300)
    assert activity.tokens("a") == 340
    activity.start("w", "b", 100)
    assert (activity.tokens("a"), activity.tokens("b")) == (40, 100)
    activity.end("w")
    activity.end("w")
    assert (activity.tokens("a"), activity.tokens("b")) == (40, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(ENGINES), st.one_of(st.none(), st.floats(0, 1e12, width=64))),
        max_size=60,
    )
)
def test_the_sums_are_those_of_the_entries_and_end_at_exactly_zero(
    events: list[tuple[int, str, float | None]],
) -> None:
    activity = Activity()
    alive: dict[int, tuple[str, float]] = {}
    for workflow, name, tokens in events:
        if tokens is None:
            activity.end(str(workflow))
            alive.pop(workflow, None)
        else:
            activity.start(str(workflow), name, tokens)
            alive[workflow] = (name, tokens)
        for engine in ENGINES:
            entries = [tokens for on, tokens in alive.values() if on == engine]
            assert abs(activity.tokens(engine) - sum(entries)) <= 1e-6 * len(entries) + 1e-9 * sum(entries)
    for workflow in alive:
        activity.end(str(workflow))
    assert activity == Activity()
