"""The bench of preprocessing: on a little text, and what it says of its bounds."""

from __future__ import annotations

import email
import re
from pathlib import Path

import pytest

from megatron_lab.benchmarks import preprocessing


def test_it_measures_all_four(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(preprocessing, "_DOCUMENT_STRIDE", 1)
    monkeypatch.setattr(preprocessing.sysconfig, "get_path", lambda name: str(Path(email.__file__).parent))
    held = preprocessing.run(preprocessing.Settings(megabytes=0.05, pairs=1, stream_gb=0.0002, vocab_size=400))
    told = capfd.readouterr()
    # A rendezvous store of an earlier test in this process may report late that its peer has ended.
    assert not told.err or "[c10d] recvValue failed" in told.err
    assert len(re.findall(r"^  .* \d+\.\d MB/s  \(\d+\.\d to \d+\.\d\)$", told.out, re.MULTILINE)) == 6
    assert len(re.findall(r"^  ratio \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\), minimum \d\.\d\d", told.out, re.MULTILINE)) == 3
    (peak,) = re.findall(r"^peak memory of a process over 0\.0 GB of jsonl: (\d+) MB, limit 300", told.out, re.MULTILINE)
    assert 20 < int(peak) < 300
    assert held == ("MISSED" not in told.out)


def test_the_text_is_enough_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text("".join(f"line {number} {n}\n" for n in range(9)))
    monkeypatch.setattr(preprocessing.sysconfig, "get_path", lambda name: str(tmp_path))
    found = preprocessing.collect_texts(0.001)
    assert found == preprocessing.collect_texts(0.001)
    assert sum(map(len, found)) > 1000
    assert len(set(found)) == len(found) > 3, "shuffled lines where there is too little"


def test_a_missed_bound_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"mine": [1.0, 2.0, 1.0], "theirs": [0.8, 1.8, 9.0]}
    assert preprocessing.print_speeds(times, 10.0, 0.9)
    assert not preprocessing.print_speeds(times, 10.0, 0.91)
    told = capsys.readouterr().out
    assert "mine " in told and "10.0 MB/s  (5.0 to 10.0)" in told
    assert told.count("ratio 0.90 (0.80 to 9.00), minimum") == 2
    assert told.count("MISSED") == 1
