"""A mesh that is too small for its job is waited with, and then the job fails."""

from services.planner.feasibility import SHORT_S, Shortfall, hopeless, shortfall
from tests.unit.planner.seen import gang, job


def test_a_mesh_that_has_what_the_job_needs_is_not_short() -> None:
    assert shortfall([gang(0), gang(1)], job(), Shortfall("job", 0.0, "g1"), 5.0) is None


def test_how_long_a_mesh_has_been_short_is_counted_for_each_job() -> None:
    first = shortfall([gang(0)], job(), None, 5.0)
    assert first is not None and first.since_s == 5.0 and "this mesh has 1" in first.why
    later = shortfall([gang(0)], job(), first, 9.0)
    assert later == first
    other = shortfall([gang(0)], job(id="other"), first, 9.0)
    assert other is not None and (other.job, other.since_s) == ("other", 9.0)


def test_a_job_is_given_up_when_it_has_waited_for_long() -> None:
    short = Shortfall("job", 5.0, "")
    assert not hopeless(short, 5.0 + SHORT_S)
    assert hopeless(short, 5.1 + SHORT_S)
