"""Past lengths survive the shard that saw them."""

from pathlib import Path

from meshrl.common.base.files.lines import line
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.rollout.routing.length_history import NAME, LengthHistory
from meshrl.services.rollout.routing.lengths import Past

STATE = ("run", "small", "failure")


def pasts(count: int) -> list[Past]:
    return [Past(n % 3, ((STATE, n), (STATE, 2 * n)), 3 * n) for n in range(count)]


def kept(directory: Path, limit: int) -> list[Past]:
    history = LengthHistory(SystemHost(), directory, limit)
    try:
        return history.latest
    finally:
        history.close()


def test_a_successor_finds_what_its_predecessor_saw(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=50)
    for past in pasts(20):
        history.append(past)
    assert kept(tmp_path, 50) == pasts(20)  # the predecessor was killed: nothing was closed


def test_only_the_latest_are_kept_and_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    for past in pasts(95):
        history.append(past)
    history.close()
    assert kept(tmp_path, 10) == pasts(95)[-10:]
    assert len((tmp_path / NAME).read_bytes().splitlines()) <= 20


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    for past in pasts(5):
        history.append(past)
    history.close()
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-7])
    assert kept(tmp_path, 10) == pasts(4)


def test_a_whole_line_of_another_shape_costs_only_itself(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path, limit=10)
    history.append(pasts(1)[0])
    history.close()
    with (tmp_path / NAME).open("ab") as file:
        for past in ([1, [["run", 5]], 3], [1, 2], 7):
            file.write(line({"past": past}, 0))
    assert kept(tmp_path, 10) == pasts(1)


def test_a_flipped_bit_costs_its_line_and_the_file_is_set_aside(tmp_path: Path) -> None:
    history = LengthHistory(SystemHost(), tmp_path / "ledger", limit=10, root=tmp_path)
    for past in pasts(5):
        history.append(past)
    history.close()
    path = tmp_path / "ledger" / NAME
    content = bytearray(path.read_bytes())
    content[12] ^= 1  # a digit of the first line
    path.write_bytes(content)
    after = LengthHistory(SystemHost(), tmp_path / "ledger", limit=10, root=tmp_path)
    assert after.latest == pasts(5)[1:] and after.damage == "1 of 5 lines are damaged"
    assert after.aside == tmp_path / "quarantine" / "ledger" / NAME
    assert after.aside.read_bytes() == content
    after.close()
    assert not LengthHistory(SystemHost(), tmp_path / "ledger", limit=10).damage
