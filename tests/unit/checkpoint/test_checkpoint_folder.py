"""Which checkpoint is resumed from, and which stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.save_folder import (
    LATEST,
    Retention,
    apply_retention,
    check_no_foreign_checkpoints,
    find_checkpoint,
    get_checkpoint_name,
    list_checkpoints,
    read_latest,
    select_retained,
)
from megatron.checkpoint.storage_url import open_storage
from tests.support.checkpoint_worlds import save_checkpoint, whole


def save(folder: Path, *iterations: int) -> None:
    for iteration in iterations:
        save_checkpoint(folder, iteration, [whole("a", torch.ones(1))], {}, {})


def there(folder: Path) -> list[int]:
    return list(list_checkpoints(folder))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "none") is None
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* has no checkpoint of this iteration. .*: none"):
        find_checkpoint(tmp_path, 3)


def test_the_newest_or_the_step_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1, 5, 12345678)
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == tmp_path / "iter_12345678"
    assert find_checkpoint(tmp_path, 5, warn=said.append) == tmp_path / "iter_0000005"
    assert said == []
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* iteration with a checkpoint: 12345678, 5, 1"):
        find_checkpoint(tmp_path, 3)


def test_the_one_saved_last_counts_after_going_back(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 15)
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == tmp_path / "iter_0000015"
    assert "iter_0000020 is newer but was not saved last" in said[0]


@pytest.mark.parametrize("text", [None, "", "release", "99", "9" * 5000, "²"])
def test_a_latest_file_that_does_not_help(tmp_path: Path, text: str | None) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)
    said: list[str] = []
    assert find_checkpoint(tmp_path, warn=said.append) == tmp_path / "iter_0000020"
    assert len(said) == 1 and ("iter_0000099" if text == "99" else LATEST) in said[0]


def test_a_folder_in_place_of_the_latest_file(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    assert read_latest(open_storage(tmp_path)) is None


def test_lost_checkpoints_are_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / LATEST).unlink()
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(CheckpointError, match=r"(?s)holds no complete checkpoint.*has no manifest\.json"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_given_instead_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=f"give --load {tmp_path}"):
        find_checkpoint(tmp_path / "iter_0000003")


def test_other_names_are_not_checkpoints(tmp_path: Path) -> None:
    for name in (".iter_0000001.saving", "iter_1", "iter_0000002.bak", "xiter_0000003"):
        (tmp_path / name).mkdir()
    assert there(tmp_path) == [] and find_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("keep_last", "interval", "stay"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (2, None, [8, 10]),
        (1, None, [10]),
        (9, None, [2, 4, 6, 8, 10]),
        (None, 4, [4, 8, 10]),
        (2, 4, [4, 8, 10]),
        (2, 6, [6, 8, 10]),
        (None, 100, [10]),
    ],
)
def test_what_stays(tmp_path: Path, keep_last: int | None, interval: int | None, stay: list[int]) -> None:
    for iteration in (2, 4, 6, 8, 10):
        (tmp_path / get_checkpoint_name(iteration)).mkdir()
        (tmp_path / get_checkpoint_name(iteration) / "manifest.json").write_text("x")
    apply_retention(open_storage(tmp_path), Retention(keep_last, interval))
    assert there(tmp_path) == stay
    assert len(list(tmp_path.iterdir())) == len(stay)


@given(
    st.lists(st.integers(0, 50), min_size=1, unique=True),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 20),
    st.data(),
)
def test_the_newest_and_the_latest_always_stay(
    iterations: list[int], keep_last: int | None, interval: int | None, data: st.DataObject
) -> None:
    latest = data.draw(st.sampled_from([None, *iterations]))
    stay = select_retained(iterations, latest, Retention(keep_last, interval))
    assert max(iterations) in stay and (latest is None or latest in stay)
    assert stay <= set(iterations)
    reached = sorted(iterations if latest is None else [it for it in iterations if it <= latest])
    assert set(reached[-(keep_last or 1) :]) <= stay


def test_the_latest_stays_after_going_back(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 15)
    apply_retention(open_storage(tmp_path), Retention(1))
    assert there(tmp_path) == [15, 20, 30] and read_latest(open_storage(tmp_path)) == 15
    save(tmp_path, 25)
    apply_retention(open_storage(tmp_path), Retention(2))
    assert there(tmp_path) == [20, 25, 30]


def test_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "iter_0000001").rename(tmp_path / ".iter_0000001.removing")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    save(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000002", "iter_0000003", LATEST}


def test_a_folder_of_another_program_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    (tmp_path / "iter_0000004").mkdir()
    check_no_foreign_checkpoints(open_storage(tmp_path))  # ours, damaged or empty
    (tmp_path / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another program: iter_0000003\. Set --save to another folder"):
        check_no_foreign_checkpoints(open_storage(tmp_path))


def test_a_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    save(tmp_path, 2, 3, 4)
    apply_retention(open_storage(tmp_path), Retention(2))
    assert there(tmp_path) == [1, 3, 4]


def test_nothing_to_remove(tmp_path: Path) -> None:
    save(tmp_path, 1)
    apply_retention(open_storage(tmp_path), Retention())
    apply_retention(open_storage(tmp_path / "none"), Retention(1))
    assert there(tmp_path) == [1]
