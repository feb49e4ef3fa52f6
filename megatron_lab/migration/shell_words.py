"""Lexer for bash scripts: it splits a script into words, array assignments and ends of commands. It expands and runs nothing.

It understands quotes, comments, continued lines, arrays and here-documents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

Quote = Literal["", "'", '"']
"""Quote character around a text; empty for unquoted text."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=\Z")
"""Name and operator of an assignment: ``NAME=`` or ``NAME+=``."""
_COMMAND_ENDS = (";;", "&&", "||", ";", "|", "&", "\n", "(", ")")
"""Operators that end a command."""
_REDIRECT = re.compile(r"(?:\d*|&)>>?(?:&\d)?|<(?!<)|<<<")
_HERE_DOCUMENT = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")


@dataclass
class Word:
    """Word of a bash script, as a list of texts that each have one type of quotes. Expansions such as ``$NAME`` are not
    expanded."""

    fragments: list[tuple[str, Quote]]
    """(text, quote) pairs. A character after a backslash is stored as text in single quotes, because it is not expanded."""
    lineno: int

    @property
    def text(self) -> str:
        """Text of the word without its quotes."""
        return "".join(text for text, _ in self.fragments)

    @property
    def unquoted_text(self) -> str:
        """Text of the word if no part of it is quoted, as in a keyword; otherwise empty."""
        return self.text if all(quote == "" for _, quote in self.fragments) else ""


@dataclass
class Token:
    """Token of a bash script: a word, the assignment of an array, or the end of a command."""

    type: Literal["word", "array", "end"]
    lineno: int
    word: Word | None = None
    """The word, if the token has type ``word``."""
    text: str = ""
    """If the token has type ``end``: operator that ends the command, such as ``;`` or a newline. If it has type ``array``: name
    with its operator, such as ``ARGS=``."""
    items: list[Word] = field(default_factory=list)
    """Elements of the array, if the token has type ``array``."""
    output_files: list[Word] = field(default_factory=list)
    """Files to which the command that this token ends writes its output (``> FILE``). Only tokens of type ``end`` have any."""
    here_document: Word | None = None
    """Text of the command's here-document (``<< EOF``), if the token has type ``end``."""


class ShellLexer:
    """Lexer that splits a bash script into tokens: words, array assignments and ends of commands.

    Args:
        text: text of the script.
        lineno: line number of the first line, for messages.
    """

    def __init__(self, text: str, lineno: int = 1) -> None:
        self._text, self._position, self._lineno = text, 0, lineno
        self._here_documents: list[tuple[str, bool, Token]] = []
        self._output_files: list[Word] = []

    def tokenize(self) -> list[Token]:
        """Return all tokens of the script. The last token has type ``end``.

        Raises:
            ValueError: a quote or a bracket is not closed.
        """
        tokens: list[Token] = []
        while (token := self._read_token()) is not None:
            tokens.append(token)
        tokens.append(self._build_end_token("\n"))
        return tokens

    def _read_token(self) -> Token | None:
        """Read the next token, or return None at the end of the script.

        Redirections and here-documents are not separate tokens: they are stored in the next ``end`` token.
        """
        self._skip_blanks()
        if self._position >= len(self._text):
            return None
        remaining = self._text[self._position :]
        if match := _HERE_DOCUMENT.match(remaining):
            self._position += match.end()
            self._here_documents.append((match[3], not match[2], Token("end", self._lineno)))
            return self._read_token()
        if (match := _REDIRECT.match(remaining)) and match[0]:
            self._position += match.end()
            if not re.search(r"&\d\Z", match[0]):
                self._skip_blanks()
                target = self._read_word()
                if ">" in match[0]:
                    self._output_files.append(target)
            return self._read_token()
        for end in _COMMAND_ENDS:
            if remaining.startswith(end):
                self._position += len(end)
                token = self._build_end_token(end)
                if end == "\n":
                    self._lineno += 1
                    self._read_here_documents(token)
                return token
        word = self._read_word()
        if (
            len(word.fragments) == 1
            and _ASSIGNMENT.match(word.unquoted_text)
            and self._text[self._position : self._position + 1] == "("
        ):
            self._position += 1
            return Token("array", word.lineno, text=word.unquoted_text, items=self._read_array())
        return Token("word", word.lineno, word)

    def _build_end_token(self, text: str) -> Token:
        """Build the token that ends a command. The token stores the files to which the command redirects its output.

        Args:
            text: operator that ends the command, such as ``;``.
        """
        output_files, self._output_files = self._output_files, []
        return Token("end", self._lineno, text=text, output_files=output_files)

    def _skip_blanks(self) -> None:
        """Skip blanks, comments, and line ends after a backslash."""
        while self._position < len(self._text):
            char = self._text[self._position]
            if char in " \t\r":
                self._position += 1
            elif self._text.startswith("\\\n", self._position) or self._text.startswith("\\\r\n", self._position):
                self._position = self._text.index("\n", self._position) + 1
                self._lineno += 1
            elif char == "#" and (self._position == 0 or self._text[self._position - 1] in " \t\r\n;()|&"):
                end = self._text.find("\n", self._position)
                self._position = len(self._text) if end < 0 else end
            else:
                return

    def _read_array(self) -> list[Word]:
        """Read the elements of an array, from the first element to the closing bracket."""
        items: list[Word] = []
        while True:
            self._skip_blanks()
            char = self._text[self._position : self._position + 1]
            if not char:
                raise ValueError(
                    f"line {self._lineno}: the bracket ( of an array in the script is not closed. Add the closing bracket"
                )
            if char == ")":
                self._position += 1
                return items
            if char == "\n":
                self._position, self._lineno = self._position + 1, self._lineno + 1
            else:
                items.append(self._read_word())

    def _read_word(self) -> Word:
        """Read a word. If the opening bracket of an array follows ``NAME=``, the word ends before the bracket."""
        fragments: list[tuple[str, Quote]] = []
        lineno, unquoted = self._lineno, ""
        while self._position < len(self._text):
            char = self._text[self._position]
            if char in " \t\r\n;&|()<>":
                break
            if char in "'\"":
                if unquoted:
                    fragments.append((unquoted, ""))
                    unquoted = ""
                fragments.append((self._read_quoted(char), "'" if char == "'" else '"'))
            elif char == "\\":
                next_char = self._text[self._position + 1 : self._position + 2]
                self._position += 2
                if next_char == "\n":
                    self._lineno += 1
                    continue
                if unquoted:
                    fragments.append((unquoted, ""))
                    unquoted = ""
                fragments.append((next_char, "'"))
            elif char in "$`":
                unquoted += self._read_expansion()
            else:
                unquoted += char
                self._position += 1
            if (
                unquoted
                and _ASSIGNMENT.match(unquoted)
                and not fragments
                and self._text[self._position : self._position + 1] == "("
            ):
                break
        if unquoted or not fragments:
            fragments.append((unquoted, ""))
        if not fragments[0][0] and len(fragments) == 1 and fragments[0][1] == "":  # an unexpected bracket
            self._position += 1
        return Word(fragments, lineno)

    def _read_quoted(self, quote: str) -> str:
        """Read the text between two quotes. In single quotes, all characters stay as they are.

        In double quotes, a backslash is removed if ``"`` or another backslash follows; a backslash and a line end after it are both
        removed. If ``$`` or a backtick follows, the backslash stays here and is removed when the text is expanded. Before any other
        character, the backslash stays.

        Args:
            quote: the quote character.
        """
        start_lineno = self._lineno
        self._position += 1
        text = ""
        while self._position < len(self._text):
            char = self._text[self._position]
            if char == quote:
                self._position += 1
                return text
            if quote == '"' and char == "\\":
                next_char = self._text[self._position + 1 : self._position + 2]
                self._position += 2
                if next_char == "\n":
                    self._lineno += 1
                else:
                    text += next_char if next_char in '"\\' else char + next_char
            elif quote == '"' and char in "$`":
                text += self._read_expansion()
            else:
                self._lineno += char == "\n"
                text += char
                self._position += 1
        raise ValueError(f"line {start_lineno}: the quote {quote} in the script is not closed. Add the closing quote")

    def _read_expansion(self) -> str:
        """Read an expansion that starts with ``$`` or a backtick, and return its text without expanding it."""
        start = self._position
        if self._text[start] == "`":
            end = self._text.find("`", start + 1)
            if end < 0:
                raise ValueError(f"line {self._lineno}: the backtick ` in the script is not closed. Add the closing backtick")
            self._position = end + 1
        elif self._text[start + 1 : start + 2] in ("(", "{"):
            self._position = self._find_bracket_end(start + 1)
        elif match := re.match(r"\$(\w+|[@*#?$!-])", self._text[start:]):
            name = match[1][0] if match[1][0].isdigit() else match[1]
            self._position += 1 + len(name)
        else:
            self._position += 1
        expansion = self._text[start : self._position]
        self._lineno += expansion.count("\n")
        return expansion

    def _find_bracket_end(self, start: int) -> int:
        """Return the position after the bracket that matches the opening bracket at position `start`. Brackets in quotes do not
        count."""
        closing, expected, position, quote = {"(": ")", "{": "}"}, [], start, ""
        while position < len(self._text):
            char = self._text[position]
            if char == "\\":
                position += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char in closing:
                expected.append(closing[char])
            elif expected and char == expected[-1]:
                expected.pop()
                if not expected:
                    return position + 1
            position += 1
        raise ValueError(
            f"line {self._lineno}: the bracket {self._text[start]} in the script is not closed. Add the closing bracket"
        )

    def _read_here_documents(self, end_token: Token) -> None:
        """Read the here-documents that follow a line of the script.

        Args:
            end_token: token that ends the line. The text of the last here-document is stored in this token.
        """
        for delimiter, can_expand, _ in self._here_documents:
            body = []
            while self._position < len(self._text):
                line_end = self._text.find("\n", self._position)
                line_end = len(self._text) if line_end < 0 else line_end
                text, self._position = self._text[self._position : line_end], line_end + 1
                self._lineno += 1
                if text.strip() == delimiter:
                    break
                body.append(text)
            end_token.here_document = Word([("\n".join(body) + "\n", '"' if can_expand else "'")], end_token.lineno)
        self._here_documents = []
