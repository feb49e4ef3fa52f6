"""Loop of a dialogue in the terminal: reads entries and commands, and prints the answers of the model while they are generated.

With several ranks, the first rank reads and prints. It sends each request to the other ranks, which compute the same tokens with
it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.data.tokenizer import Tokenizer
from megatron.parallel.collectives import broadcast_object
from megatron.parallel.context import ParallelContext
from megatron_lab.inference.chat_terminal import AnswerInterrupt, AnswerWriter, EntryReader, interrupt_key, uses_colour
from megatron_lab.inference.dialogue import Answer, AnswerStream, Dialogue
from megatron_lab.inference.generate import GenerationRequest, Sampling
from megatron_lab.inference.session import GenerationSession

_HELP = """\
/help            list the commands
/regenerate      write the last answer again, with other random numbers
/undo            remove the last entry and its answer
/reset           start from the beginning
/save FILE       append the dialogue to FILE, as a line of JSON
/temperature X   select the temperature; 0: always the likeliest token
/quit            leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ continues on the next one.
\"\"\" starts an entry of any number of lines, and ends it. // at the start of
an entry sends a single /."""


def follow_dialogue(session: GenerationSession, context: ParallelContext) -> None:
    """Compute the tokens of all answers together with the first rank. Called on all other ranks, until the dialogue ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends the dialogue, and then releases this rank
    while (order := broadcast_object(None, context.world)) is not None:
        request, sample_index = order
        for _ in session.generate(request, lambda: False, sample_index=sample_index):
            pass


@dataclass
class DialogueSettings:
    """Settings of a dialogue that the user can set by flags or commands."""

    sampling: Sampling
    max_new_tokens: int


class DialogueLoop:
    """Dialogue on the first rank.

    Args:
        first_entries: entries before those that the user enters.
        num_ids: number of ids in the tokenizer's vocabulary.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        session: GenerationSession,
        context: ParallelContext,
        tokenizer: Tokenizer,
        settings: DialogueSettings,
        first_entries: list[str],
    ) -> None:
        self._dialogue, self._session, self._context, self._tokenizer = dialogue, session, context, tokenizer
        self._settings, self._first_entries = settings, first_entries
        self._reads_keys = context.world.size > 1 and sys.stdin.isatty()
        self._reader, self._writer = EntryReader(reads_keys=self._reads_keys), AnswerWriter()
        self._interrupt = AnswerInterrupt(reads_keys=self._reads_keys)
        self._num_regenerated = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._note(_HELP),
            "/regenerate": self._regenerate,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/temperature": self._set_temperature,
        }

    def run(self) -> None:
        """Run the dialogue until the user leaves, or the input ends. The other ranks are released in any case."""
        try:
            with interrupt_key() if self._reads_keys else contextlib.nullcontext():
                self._run_entries()
        finally:
            broadcast_object(None, self._context.world)

    def _run_entries(self) -> None:
        for entry in self._iter_entries():
            command, _, argument = entry.strip().partition(" ")
            if command in ("/quit", "/exit"):
                break
            if command.startswith("/") and not command.startswith("//") and "\n" not in entry:
                self._run_command(command, argument.strip())
            else:
                self._dialogue.start_turn(entry[1:] if entry.startswith("//") else entry)
                self._num_regenerated = 0
                self._answer()
            if self._interrupt.count > 1:
                break

    def _iter_entries(self) -> Iterator[str]:
        """Yield the entries of the user, until the end of the input or two Ctrl-C after each other."""
        for first_entry in self._first_entries:
            self._note(f"> {first_entry}")
            yield first_entry
        was_interrupted = False
        while True:
            try:
                entry = self._reader.read()
            except KeyboardInterrupt:
                line_end = "" if self._reads_keys else "\n"  # of the line with the prompt
                if was_interrupted or not self._reader.is_terminal:
                    sys.stderr.write(line_end)
                    return
                self._note(f"{line_end}(Ctrl-C again, or Ctrl-D, leaves)")
                was_interrupted = True
                continue
            was_interrupted = False
            if entry is None:
                if self._reader.is_terminal:
                    self._note("")
                return
            if entry.strip() or self._dialogue.continues_on_empty_entry:
                yield entry

    def _answer(self) -> None:
        """Generate the answer to the last entry, print it and store it. An entry without an answer is removed."""
        try:
            answer = self._generate()
        except ValueError as error:
            self._dialogue.undo_turn()
            self._note(f"{error}. The entry was not added")
            return
        if self._interrupt.count and not answer.text:
            self._dialogue.undo_turn()
            self._note("(stopped; the entry was removed)")
            return
        self._dialogue.finish_turn(answer.text)
        if self._interrupt.count:
            self._note("(stopped; what was written stays)")
        elif not answer.has_ended:
            self._note(f"(ends after {answer.num_tokens:,} tokens: --max-new-tokens, or the context is full)")
        elif not answer.text.strip():
            self._note("(empty answer)")

    def _generate(self) -> Answer:
        dialogue, settings = self._dialogue, self._settings
        prompt, note = dialogue.build_prompt(settings.max_new_tokens)
        if note is not None:
            self._note(f"({note})")
        request = GenerationRequest(
            [prompt],
            min(settings.max_new_tokens, self._session.num_positions - len(prompt)),
            settings.sampling,
            stop_ids=dialogue.stop_ids,
            num_ids=self._tokenizer.vocab_size,
            first_prompt=dialogue.num_turns,
        )
        self._session.check(request)
        stream = AnswerStream(self._tokenizer, prompt, dialogue.stop_text, self._writer.write)
        error: OSError | None = None
        with self._interrupt.watch() as should_stop:
            broadcast_object((request, self._num_regenerated), self._context.world)
            steps = self._session.generate(
                request,
                lambda: error is not None or stream.has_ended or should_stop(),
                sample_index=self._num_regenerated,
            )
            for id in steps:
                try:
                    stream.add(id)
                except OSError as write_error:  # the reader of stdout has left; the other ranks still wait for the next token
                    error = write_error
            if error is not None:
                raise error
            answer = stream.finish()
        self._writer.finish()
        return answer

    def _run_command(self, command: str, argument: str) -> None:
        run = self._commands.get(command)
        if run is None:
            self._note(f"there is no command {command}; /help lists the commands. An entry that begins with / is written with //")
        else:
            run(argument)

    def _regenerate(self, _: str) -> None:
        if not self._dialogue.remove_answer():
            self._note("there is no answer yet")
            return
        if self._settings.sampling.is_greedy:
            self._note("with temperature 0 the answer is the same each time; /temperature 0.8 samples")
        self._num_regenerated += 1
        self._answer()

    def _undo(self, _: str) -> None:
        self._note("the last entry was removed" if self._dialogue.undo_turn() else "there is no entry to remove")

    def _reset(self, _: str) -> None:
        self._dialogue.reset()
        self._note("the dialogue starts from the beginning")

    def _save(self, argument: str) -> None:
        record = self._dialogue.to_record()
        if not argument or record is None:
            self._note("/save needs the name of a file: /save FILE" if record is not None else "there is nothing to save yet")
            return
        try:
            with Path(argument).expanduser().open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            self._note(f"{argument} cannot be written: {error.strerror}. Choose another file")
            return
        self._note(f"added to {argument} as a line of JSON")

    def _set_temperature(self, argument: str) -> None:
        sampling = self._settings.sampling
        try:
            self._settings.sampling = replace(sampling, temperature=float(argument)) if argument else sampling
        except ValueError:
            self._note(f"/temperature needs a number of at least 0, such as 0.8, not {argument!r}")
            return
        self._note(f"temperature {self._settings.sampling.temperature:g}")

    def _note(self, text: str) -> None:
        """Print a note on stderr, on a terminal in faint letters."""
        sys.stdout.flush()
        print(f"\033[2m{text}\033[0m" if text and uses_colour(sys.stderr) else text, file=sys.stderr, flush=True)
