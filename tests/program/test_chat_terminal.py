"""tools/generate_text.py --chat and --interactive: from a pipe, at a terminal, on several ranks, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.config.data import DataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron_lab.commands import generate_text
from megatron_lab.inference.chat_format import ChatFormat
from megatron_lab.inference.generate import Sampling
from megatron_lab.inference.language_model import LanguageModel
from megatron_lab.verification.local_ranks import run_ranks
from megatron_lab.verification.reference.shape import build_random_weights
from tests.support.chats import PLAIN, write_tokenizer
from tests.support.legacy_checkpoints import LegacyLayout, write_legacy
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.reference_runs import llama_like

LINES = ["the cat?", "that hat", "more"]
NUM_POSITIONS = 4096
WORD = "ü東 "
"""Text of different bytes, with characters of two and of three bytes."""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model that never ends an answer with temperature 0: the tokens that do have no weight in its output layer."""
    folder = tmp_path_factory.mktemp("model")
    config = DataConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(write_tokenizer(folder / "tokenizer", PLAIN).parent)
    )
    tokenizer = build_tokenizer(config)
    shape = llama_like(vocab=tokenizer.vocab_size, seq=NUM_POSITIONS)
    weights = {name: weight.float() for name, weight in build_random_weights(shape, seed=4, std=0.3).items()}
    weights["output.weight"][[*ChatFormat(tokenizer).stop_ids]] = 0.0
    write_legacy(folder / "save", shape, weights, LegacyLayout(1, 1))
    model = [
        "--load",
        str(folder / "save"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(config.tokenizer_model),
    ]
    return [*model, "--temperature", "0", "--device", "cpu", "--dtype", "float64"]


@pytest.fixture(scope="module")
def two_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model of bytes that continues every text by WORD again and again."""
    folder, word = tmp_path_factory.mktemp("words"), WORD.encode()
    shape = llama_like(vocab=257, seq=NUM_POSITIONS)
    weights = {name: torch.zeros_like(weight) for name, weight in build_random_weights(shape, seed=4, std=0.3).items()}
    weights["final_norm.weight"][:] = 1.0
    # The layers add nothing. The embedding of a byte is the axis of the byte after it; axis 0 is that of the first byte.
    weights["embedding.word.weight"][:, 0] = 1.0
    for place, byte in enumerate(word):
        axis = (place + 1) % len(word)
        weights["embedding.word.weight"][byte] = torch.eye(shape.hidden)[axis]
        weights["output.weight"][byte, place] = 1.0
    write_legacy(folder, shape, weights, LegacyLayout(1, 1))
    return ["--load", str(folder), "--tokenizer-type", "ByteTokenizer", "--temperature", "0", "--device", "cpu"]


def enter(lines: list[str], words: list[str]) -> tuple[int, str]:
    """Run the tool with these lines in its stdin. Return its status and what it printed."""
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            return generate_text.main(words), out.getvalue()
    finally:
        sys.stdin = stdin


def expected_answers(flags: list[str], num_tokens: int, system: str | None = None) -> list[str]:
    """Return the answers to LINES, each computed from the beginning."""
    config = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=flags[5])
    answers = []
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in LINES:
        messages.append({"role": "user", "content": line})
        with LanguageModel.load(flags[1], tokenizer=config, dtype=torch.float64) as model:
            answers.append(model.chat(messages, num_tokens, sampling=Sampling(temperature=0)))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def shown(answers: list[str]) -> str:
    return "".join(answer if answer.endswith("\n") else answer + "\n" for answer in answers)


def test_every_line_of_a_pipe_is_a_turn(flags: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*flags, "--chat", "--max-new-tokens", "9", "--system", "be a hatter"]
    expected = expected_answers(flags, 9, "be a hatter")
    saved = tmp_path / "saved.jsonl"
    assert enter([*LINES, f"/save {saved}", "/nonsense"], words) == (0, shown(expected))
    messages = capsys.readouterr().err
    assert "> the cat?\n" in messages and "there is no command /nonsense" in messages
    (record,) = map(json.loads, saved.read_text().splitlines())
    contents = ["be a hatter", *(text for pair in zip(LINES, expected, strict=True) for text in pair)]
    assert [message["content"] for message in record["messages"]] == contents
    assert enter(LINES[1:], [*words, "--prompt", LINES[0]]) == (0, shown(expected))


def test_commands_change_the_dialogue(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*flags, "--chat", "--max-new-tokens", "9"]
    first, second, third = expected_answers(flags, 9)
    assert enter([LINES[0], "wrong", "/undo", LINES[1], "/regenerate"], words)[1].endswith(shown([second, second]))
    assert enter([LINES[0], "/reset", LINES[0], "/undo", "/undo"], words) == (0, shown([first, first]))
    assert "there is no entry to remove" in capsys.readouterr().err
    sampled = enter(["/temperature x", "/temperature 3", LINES[0], "/regenerate", "/quit", LINES[1]], words)[1]
    assert shown([first]) not in sampled
    assert "/temperature needs a number" in capsys.readouterr().err
    assert enter([LINES[0], "<|im_end|>", LINES[1], "/save /no/folder/x"], words) == (0, shown([first, second]))
    told = capsys.readouterr().err
    assert "is reserved" in told and "cannot be written" in told and third


def test_a_conversation_has_no_warnings(flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a tokenizer that needs the slower library."""
    path = write_tokenizer(tmp_path / "tokenizer", PLAIN)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "pre_tokenizer": None}))
    words = [str(path.parent) if word == flags[5] else word for word in flags]
    assert enter(LINES[:1], [*words, "--chat", "--max-new-tokens", "2"])[0] == 0
    assert not caplog.records


def test_a_long_conversation_goes_on(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["the cat " * 400] * 6
    status, out = enter(lines, [*flags, "--chat", "--max-new-tokens", "3"])
    assert status == 0 and len(out) >= 6
    assert "oldest messages" in capsys.readouterr().err
    assert enter(["the cat " * 3000, LINES[0]], [*flags, "--chat", "--max-new-tokens", "9"])[1] == shown(
        expected_answers(flags, 9)[:1]
    )
    assert "Shorten the message" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layout",
    [pytest.param([], marks=pytest.mark.full("tensor ranks under torchrun")), ["--pipeline-model-parallel-size", "2"]],
    ids=["tp2", "pp2"],
)
def test_the_same_conversation_on_two_processes(flags: list[str], layout: list[str]) -> None:
    words = [*flags, "--chat", "--max-new-tokens", "9", *layout]

    def rank_prints(rank: int) -> tuple[int, str]:
        return enter(LINES if rank == 0 else [], words)

    assert run_ranks(2, rank_prints, init=False) == [(0, shown(expected_answers(flags, 9))), (0, "")]


def test_texts_are_continued(flags: list[str]) -> None:
    """Each line; an empty line continues the last text."""
    words = [*flags, "--interactive", "--max-new-tokens", "6"]
    config = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=flags[5])
    with LanguageModel.load(flags[1], tokenizer=config, dtype=torch.float64) as model:
        first = model.generate("the cat", 6, sampling=Sampling(temperature=0))
        second = model.generate("the cat" + first, 6, sampling=Sampling(temperature=0))
    complete = second.rstrip("\ufffd")  # the last token begins a character
    assert complete != second and enter(["the cat", "", "the cat"], words) == (0, shown([first, complete, first]))


Terminal = Callable[..., PseudoTerminal]


@pytest.fixture
def terminal(flags: list[str]) -> Terminal:
    """Start the tool at a terminal."""

    def start(
        *words: str, model: list[str] = flags, launcher: tuple[str, ...] = (), columns: int = 80, **environment: str
    ) -> PseudoTerminal:
        program = [sys.executable, *launcher, "tools/generate_text.py", *model, *words]
        settings = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment}
        return PseudoTerminal(program, {**os.environ, **settings}, columns)

    return start


def test_a_conversation_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    """Ctrl-C stops an answer, which stays; two at the prompt leave."""
    saved = tmp_path / "saved.jsonl"
    with terminal("--chat", "--max-new-tokens", "3000", columns=50) as screen:
        screen.wait_for("> $")
        screen.press("the cat \\\nthat\n")
        screen.wait_for(r"\. that\n\S+")
        screen.press("\x03")
        answer = screen.wait_for("stays\\)\n> $")
        screen.press(f"/save {saved}\n")
        screen.wait_for("JSON\n> $")
        screen.press('"""\na\nb\n"""\n')
        screen.wait_for(r'\. """\n\S+')
        screen.press("\x03")
        screen.wait_for("> $")
        screen.press("half a line\x03")
        screen.wait_for("leaves\\)\n> $")
        screen.press("\x03")
        assert screen.wait_for_end() == 0 and screen.is_restored()
        assert "\x1b[" not in screen.output.replace("\x1b[?2004h", "").replace("\x1b[?2004l", "").replace("\x1b[K", "")
    (record,) = map(json.loads, saved.read_text().splitlines())
    question, written = (message["content"] for message in record["messages"])
    assert question == "the cat \nthat" and written and "Traceback" not in answer


def test_only_complete_characters_appear(terminal: Terminal, two_words: list[str]) -> None:
    """Each token is one byte. Words appear while the model writes, and lines break between them."""
    with terminal("--interactive", "--max-new-tokens", "4000", model=two_words, columns=40) as screen:
        screen.wait_for("> $")
        screen.press("größe \n")
        line = " ".join([WORD.strip()] * 10)  # 39 of 40 columns: a character of three bytes has two
        screen.wait_for(f"größe \n{line}\n{line}\n")
        screen.press("\x03")
        screen.wait_for("stays\\)\n> $")
        screen.press("\n")  # continues the text, wherever it was stopped
        screen.wait_for(WORD)
        screen.press("\x03")
        screen.wait_for("stays\\)\n> $")
        screen.press("\x04")
        assert screen.wait_for_end() == 0 and screen.is_restored()
        assert "\ufffd" not in screen.output and "Traceback" not in screen.output


def test_colours_only_where_they_are_wanted(terminal: Terminal) -> None:
    with terminal("--chat", "--max-new-tokens", "2", NO_COLOR="") as screen:
        screen.wait_for("> \x1b")
        screen.press("\x04")
        assert screen.wait_for_end() == 0 and "\x1b[1;32m" in screen.output


def test_ctrl_c_on_several_ranks(terminal: Terminal) -> None:
    """Torchrun gets no signal; all ranks stop at the same token, and the conversation goes on."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    with terminal("--chat", "--max-new-tokens", "3000", launcher=launcher) as screen:
        screen.wait_for("> $")
        for _ in range(2):
            screen.press("the cat\n")
            screen.wait_for(r"the cat\n\S+")
            screen.press("\x03")
            screen.wait_for("stays\\)\n> $")
        screen.press("\x03")
        screen.wait_for("leaves\\)\n> $")
        screen.press("\x04")
        assert screen.wait_for_end() == 0, screen.output
        assert "Traceback" not in screen.output and screen.is_restored()


REFUSED = {
    "system alone": (["--system", "x"], "--system has no effect without --chat"),
    "template alone": (["--interactive", "--chat-template", "chatml"], "--chat-template has no effect without --chat"),
    "samples": (["--chat", "--num-samples", "2", "--temperature", "1"], "--num-samples does not apply with --chat"),
    "json": (["--interactive", "--json"], "--json does not apply with --interactive: /save FILE"),
    "batch": (["--chat", "--batch-size", "2"], "--batch-size does not apply"),
    "bos": (["--chat", "--add-bos"], "--add-bos does not apply with --chat: the template"),
    "eod": (["--chat", "--ignore-eod"], "--ignore-eod does not apply with --chat"),
    "both": (["--chat", "--interactive"], "not allowed with argument --chat"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_flags(flags: list[str], capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, message = REFUSED[case]
    with pytest.raises(SystemExit, match="2"):
        generate_text.main([*flags, *words])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_base_model_is_told_from_a_chat_model(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*flags[:2], "--tokenizer-type", "ByteTokenizer", "--chat"]
    assert generate_text.main(words) == 1
    assert "--interactive" in capsys.readouterr().err
