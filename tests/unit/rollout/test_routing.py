"""Where trajectories go."""

from hypothesis import given
from hypothesis import strategies as st

from services.rollout.routing import EngineLoad, choose

loads = st.lists(
    st.builds(
        EngineLoad,
        name=st.sampled_from([f"engine/g{i}" for i in range(6)]),
        bound=st.integers(1, 8),
        held=st.integers(0, 10),
        version=st.integers(0, 4),
    ),
    unique_by=lambda e: e.name,
)


@given(loads, st.integers(0, 4))
def test_the_least_loaded_admissible_engine_with_room_is_chosen(
    engines: list[EngineLoad], floor: int
) -> None:
    name = choose(engines, floor)
    fit = {e.name: e for e in engines if e.version >= floor and e.held < e.bound}
    if name is None:
        assert not fit
    else:
        assert fit[name].held / fit[name].bound == min(e.held / e.bound for e in fit.values())


@given(loads, st.integers(0, 4))
def test_a_trajectory_stays_where_its_keys_and_values_are(
    engines: list[EngineLoad], floor: int
) -> None:
    for engine in engines:
        chosen = choose(engines, floor, engine.name)
        if engine.version >= floor:
            assert chosen == engine.name
        else:
            assert chosen != engine.name
