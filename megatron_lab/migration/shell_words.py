"""The words of a bash script: quotes, comments, continued lines, arrays, here-documents. Nothing is run or expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

Quote = Literal["", "'", '"']
_NAME = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_ENDS = (";;", "&&", "||", ";", "|", "&", "\n", "(", ")")
_REDIRECT = re.compile(r"(?:\d*|&)>>?(?:&\d)?|<(?!<)|<<<")
_HERE = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")


@dataclass
class Word:
    """A word as it is written: pieces of text, each with the quotes around it."""

    pieces: list[tuple[str, Quote]]
    line: int

    @property
    def text(self) -> str:
        """Without its quotes."""
        return "".join(text for text, _ in self.pieces)

    @property
    def plain(self) -> str:
        """The text of a word without any quotes, as keywords are; empty for others."""
        return self.text if all(quote == "" for _, quote in self.pieces) else ""


@dataclass
class Token:
    """A word, an array that is assigned, or what ends a command."""

    kind: Literal["word", "array", "end"]
    line: int
    word: Word | None = None
    text: str = ""
    """What ends the command, or the name of the array with its operator."""
    words: list[Word] = field(default_factory=list)
    """Of an array."""
    into: list[Word] = field(default_factory=list)
    """Of the end of a command: the files that it writes."""
    here: Word | None = None
    """Of the end of a command: its here-document."""


class Reader:
    """Cuts a script into tokens.

    Raises:
        ValueError: a quote or a bracket is not closed.
    """

    def __init__(self, text: str, line: int = 1) -> None:
        self._text, self._at, self._line = text, 0, line
        self._here: list[tuple[str, bool, Token]] = []
        self._into: list[Word] = []

    def tokens(self) -> list[Token]:
        """All of them."""
        found: list[Token] = []
        while (token := self._next()) is not None:
            found.append(token)
        found.append(self._end("\n"))
        return found

    def _next(self) -> Token | None:
        self._skip()
        if self._at >= len(self._text):
            return None
        rest = self._text[self._at :]
        if match := _HERE.match(rest):
            self._at += match.end()
            self._here.append((match[3], not match[2], Token("end", self._line)))
            return self._next()
        if (match := _REDIRECT.match(rest)) and match[0]:
            self._at += match.end()
            if not re.search(r"&\d\Z", match[0]):
                self._skip()
                target = self._word()
                if ">" in match[0]:
                    self._into.append(target)
            return self._next()
        for end in _ENDS:
            if rest.startswith(end):
                self._at += len(end)
                token = self._end(end)
                if end == "\n":
                    self._line += 1
                    self._read_here(token)
                return token
        word = self._word()
        if len(word.pieces) == 1 and _NAME.match(word.plain) and self._text[self._at : self._at + 1] == "(":
            self._at += 1
            return Token("array", word.line, text=word.plain, words=self._array())
        return Token("word", word.line, word)

    def _end(self, text: str) -> Token:
        into, self._into = self._into, []
        return Token("end", self._line, text=text, into=into)

    def _skip(self) -> None:
        """Pass over blanks, comments and continued lines."""
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at) or self._text.startswith("\\\r\n", self._at):
                self._at = self._text.index("\n", self._at) + 1
                self._line += 1
            elif here == "#" and (self._at == 0 or self._text[self._at - 1] in " \t\r\n;()|&"):
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _array(self) -> list[Word]:
        found: list[Word] = []
        while True:
            self._skip()
            here = self._text[self._at : self._at + 1]
            if not here:
                raise ValueError(f"line {self._line}: a ( is not closed")
            if here == ")":
                self._at += 1
                return found
            if here == "\n":
                self._at, self._line = self._at + 1, self._line + 1
            else:
                found.append(self._word())

    def _word(self) -> Word:
        pieces: list[tuple[str, Quote]] = []
        line, bare = self._line, ""
        while self._at < len(self._text):
            here = self._text[self._at]
            if here in " \t\r\n;&|()<>":
                break
            if here in "'\"":
                if bare:
                    pieces.append((bare, ""))
                    bare = ""
                pieces.append((self._quoted(here), "'" if here == "'" else '"'))
            elif here == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                if following == "\n":
                    self._line += 1
                    continue
                if bare:
                    pieces.append((bare, ""))
                    bare = ""
                pieces.append((following, "'"))
            elif here in "$`":
                bare += self._expansion()
            else:
                bare += here
                self._at += 1
            if bare and _NAME.match(bare) and not pieces and self._text[self._at : self._at + 1] == "(":
                break
        if bare or not pieces:
            pieces.append((bare, ""))
        if not pieces[0][0] and len(pieces) == 1 and pieces[0][1] == "":  # nothing that starts a word: a stray bracket
            self._at += 1
        return Word(pieces, line)

    def _quoted(self, quote: str) -> str:
        """The text between quotes; inside double ones \\", \\$ and \\` stay with their backslash for the expansion."""
        start = self._line
        self._at += 1
        text = ""
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == quote:
                self._at += 1
                return text
            if quote == '"' and here == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                self._at += 2
                if following == "\n":
                    self._line += 1
                else:
                    text += following if following in '"\\' else here + following
            elif quote == '"' and here in "$`":
                text += self._expansion()
            else:
                self._line += here == "\n"
                text += here
                self._at += 1
        raise ValueError(f"line {start}: a {quote} is not closed")

    def _expansion(self) -> str:
        """A $ or ` with all that belongs to it, as it is written."""
        start = self._at
        if self._text[start] == "`":
            end = self._text.find("`", start + 1)
            if end < 0:
                raise ValueError(f"line {self._line}: a ` is not closed")
            self._at = end + 1
        elif self._text[start + 1 : start + 2] in ("(", "{"):
            self._at = self._closed(start + 1)
        elif match := re.match(r"\$(\w+|[@*#?$!-])", self._text[start:]):
            name = match[1][0] if match[1][0].isdigit() else match[1]
            self._at += 1 + len(name)
        else:
            self._at += 1
        found = self._text[start : self._at]
        self._line += found.count("\n")
        return found

    def _closed(self, start: int) -> int:
        """The place behind the bracket that closes the one at `start`."""
        pairs, depth, at, quote = {"(": ")", "{": "}"}, [], start, ""
        while at < len(self._text):
            here = self._text[at]
            if here == "\\":
                at += 1
            elif quote:
                quote = "" if here == quote else quote
            elif here in "'\"":
                quote = here
            elif here in pairs:
                depth.append(pairs[here])
            elif depth and here == depth[-1]:
                depth.pop()
                if not depth:
                    return at + 1
            at += 1
        raise ValueError(f"line {self._line}: a {self._text[start]} is not closed")

    def _read_here(self, end: Token) -> None:
        for name, expands, _ in self._here:
            lines = []
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                stop = len(self._text) if stop < 0 else stop
                line, self._at = self._text[self._at : stop], stop + 1
                self._line += 1
                if line.strip() == name:
                    break
                lines.append(line)
            end.here = Word([("\n".join(lines) + "\n", '"' if expands else "'")], end.line)
        self._here = []
