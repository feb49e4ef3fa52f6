"""Runs whose ranks meet at a file, or at a port, that --init-method names."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.support.runs import arguments, launch, read_metrics, report, run


def test_runs_that_meet_by_a_file_and_at_a_port(tmp_path: Path) -> None:
    """The file of an earlier run does no harm. Losses are the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = ((2, f"file://{tmp_path}/meet"), (2, f"file://{tmp_path}/meet"), (2, f"tcp://127.0.0.1:{port}"))
    losses = []
    for number, (ranks, place) in enumerate(places):
        run(arguments(init_method=place, train_iters=1, metrics_file=tmp_path / f"{number}"), ranks)
        losses.append([line["lm_loss"] for line in read_metrics(tmp_path / f"{number}")])
    assert losses[0] == losses[1] == losses[2]
    assert (tmp_path / "meet").stat().st_size > 0


def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"1234567890")
    ended = launch(arguments(init_method=f"file://{tmp_path}/data", train_iters=2), 2)
    said = report(ended)
    assert (
        all(end.code != 0 for end in ended) and "the file exists, and is not a rendezvous file of torch. It was not changed" in said
    )
    assert (tmp_path / "data").read_bytes() == b"1234567890" and "Traceback" not in said
