"""What a bash script would launch, found by reading it: nothing of it is run.

Assignments, arrays, expansions with defaults, whole-number arithmetic, functions, and conditions that follow from the script itself
are understood. What is not known stays a variable and is told.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from megatron_lab.migration.shell_words import Quote, Reader, Token, Word

_SILENT = frozenset(
    "echo printf mkdir rm cp mv ls cd pushd popd export unset set shift wait sleep exit trap tee ulimit module".split()
)
"""Commands that launch nothing."""
_LATER = frozenset(("for", "while", "until", "case", "select"))
_CLOSING = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_DEEPEST = 8
_PARAMETER = re.compile(r"\$\{(!?#?)(\w+|[@*])(\[[@*\w]+\])?(?:(:?[-=+?])(.*))?\}\Z", re.DOTALL)
_PIECE = re.compile(r"\\[$`]|\$\(\((?s:.*?)\)\)|\$\((?s:.*)\)|\$\{[^{}]*(?:\$?\{[^{}]*\}[^{}]*)*\}|\$(?:\w+|[@*#?$!-])|`[^`]*`")
_OPEN = "\0"
"""Around what is not known in a value."""


@dataclass(frozen=True)
class Launch:
    """A command that starts a training program."""

    before: tuple[str, ...]
    """Launcher and its words."""
    program: str
    argv: tuple[str, ...]
    line: int


@dataclass
class Script:
    """What was read of a script.

    Args:
        known: values of variables, positional ones by their number, which count instead of what the script sets.
    """

    known: Mapping[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Files that here-documents write."""
    passed: list[str] = field(default_factory=list)
    """Parts that were not followed, in words."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Variables that the script has a default for, with it."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Variables whose value is not known, with how the script makes them."""

    def __post_init__(self) -> None:
        self._values: dict[str, list[str]] = {name: [value] for name, value in self.known.items()}
        self._functions: dict[str, list[Token]] = {}
        self._depth = 0

    def read(self, text: str, line: int = 1) -> Script:
        """Follow a script.

        Raises:
            ValueError: it cannot be cut into words.
        """
        self._run(Reader(text, line).tokens())
        return self

    # ---- commands

    def _run(self, tokens: Sequence[Token]) -> None:
        at = 0
        while at < len(tokens):
            at = self._command(tokens, at)

    def _command(self, tokens: Sequence[Token], at: int) -> int:
        """Follow the command at a place; returns the place behind it."""
        first = tokens[at]
        word = first.word.plain if first.word is not None else ""
        if first.kind == "end":
            return at + 1
        if word == "if":
            return self._if(tokens, at)
        if word in _LATER:
            end = _closing(tokens, at, word, _CLOSING[word])
            self._pass_over(tokens[at:end], f"a {word} loop" if word != "case" else "a choice (case)")
            return end
        if word in ("{", "}", "then", "do", "done", "fi", "!", "time", "exec", "eval", "nohup", "sudo"):
            return at + 1
        if (body := _function(tokens, at)) is not None:
            name, begin, end = body
            self._functions[name] = list(tokens[begin:end])
            return end + 1
        end = next(place for place in range(at, len(tokens)) if tokens[place].kind == "end")
        self._simple(tokens[at:end], tokens[end])
        return end + 1

    def _simple(self, tokens: Sequence[Token], end: Token) -> None:
        words: list[str] = []
        for token in tokens:
            if token.kind == "array":
                self._assign(token.text, [each for word in token.words for each in self._expand(word)], token.line)
            elif token.word is not None and not words and (match := re.match(r"([A-Za-z_]\w*)(\+?=)", token.word.text)):
                self._assign_word(token.word, match)
            elif token.word is not None:
                if words and words[0] in ("export", "local", "declare", "readonly", "typeset"):
                    if match := re.match(r"([A-Za-z_]\w*)(\+?=)", token.word.text):
                        self._assign_word(token.word, match)
                    continue
                words += self._expand(token.word)
        if end.here is not None:
            text = "".join(self._expand_text(piece, quote) for piece, quote in end.here.pieces)
            self.files.update({"".join(self._expand(target)): text for target in end.into})
        if words and words[0] in ("source", "."):
            self.passed.append(f"line {tokens[0].line}: {shown(' '.join(words))} reads another file, which is not followed")
        elif words and words[0] in self._functions and self._depth < _DEEPEST:
            self._call(words[0], words[1:])
        elif words and words[0] not in _SILENT:
            self._launch(words, tokens[0].line)

    def _call(self, name: str, words: Sequence[str]) -> None:
        before = dict(self._values)
        self._values.update({str(number): [word] for number, word in enumerate(words, start=1)})
        self._depth += 1
        self._run(self._functions[name])
        self._depth -= 1
        for number in range(1, len(words) + 1):
            self._values.pop(str(number))
            if str(number) in before:
                self._values[str(number)] = before[str(number)]

    def _launch(self, words: Sequence[str], line: int) -> None:
        if "-c" in words and self._depth < _DEEPEST:  # a line for another shell
            place = words.index("-c")
            if place and PurePosixPath(words[place - 1]).name in ("bash", "sh") and place + 1 < len(words):
                self._depth += 1
                self._run(Reader(words[place + 1], line).tokens())
                self._depth -= 1
                return
        for place, word in enumerate(words):
            is_program = word.endswith(".py") and any(each.startswith("--") for each in words[place + 1 :])
            if is_program and not word.startswith("-"):
                self.launches.append(Launch(tuple(words[:place]), word, tuple(words[place + 1 :]), line))
                return

    def _if(self, tokens: Sequence[Token], at: int) -> int:
        end = _closing(tokens, at, "if", "fi")
        branches = _branches(tokens[at : end - 1])
        for condition, body in branches:
            held = True if condition is None else self._holds(condition)
            if held:
                self._run(body)
                break
            if held is None:
                said = shown(" ".join(token.word.text for token in condition or () if token.word is not None))
                self._pass_over([token for _, each in branches for token in each], f"the condition {said}")
                break
        return end

    def _pass_over(self, tokens: Sequence[Token], what: str) -> None:
        """Tell what is not followed, if it sets anything or launches."""
        names = {token.text.rstrip("+=") for token in tokens if token.kind == "array"}
        names |= {match[1] for token in tokens if token.word and (match := re.match(r"([A-Za-z_]\w*)\+?=", token.word.text))}
        programs = {token.word.text for token in tokens if token.word is not None and token.word.text.endswith(".py")}
        if names or programs:
            sets = f"sets {', '.join(sorted(names))}" if names else f"starts {', '.join(sorted(programs))}"
            self.passed.append(
                f"line {tokens[0].line}: {what} cannot be told from the script alone; what it {sets} is not followed"
            )

    # ---- conditions

    def _holds(self, tokens: Sequence[Token]) -> bool | None:
        """Whether a condition holds; None where it is not known."""
        words: list[Word | str] = []
        for token in tokens:
            if token.word is not None:
                words.append(token.word)
            elif token.text in ("&&", "||"):
                words.append(token.text)
        result: bool | None = None
        joint = ""
        for group, following in _joined(words):
            found = self._test(group)
            if joint == "&&":
                result = False if result is False or found is False else None if None in (result, found) else True
            elif joint == "||":
                result = True if result or found else None if None in (result, found) else False
            else:
                result = found
            joint = following
        return result

    def _test(self, words: Sequence[Word]) -> bool | None:
        inner = [word for word in words if word.plain not in ("[", "[[", "]", "]]", "test")]
        if len(inner) == len(words):
            return None
        turned = bool(inner) and inner[0].plain == "!"
        values = ["".join(self._expand_text(text, quote or '"') for text, quote in word.pieces) for word in inner[turned:]]
        if any(_OPEN in value for value in values):
            return None
        found: bool | None = None
        if len(values) == 3 and values[1] in _COMPARED:
            found = values[0] == values[2] if values[1] in ("=", "==") else values[0] != values[2]
        elif len(values) == 3 and values[1] in _NUMBERS and all(re.fullmatch(r"-?\d+", values[place]) for place in (0, 2)):
            found = _NUMBERS[values[1]](int(values[0]), int(values[2]))
        elif len(values) == 2 and values[0] in ("-n", "-z"):
            found = bool(values[1]) == (values[0] == "-n")
        elif len(values) == 1:
            found = bool(values[0])
        return found if found is None else found != turned

    # ---- values

    def _assign_word(self, word: Word, match: re.Match[str]) -> None:
        text, quote = word.pieces[0]
        rest = [(text[match.end() :], quote), *word.pieces[1:]]
        value = "".join(self._expand_text(piece, each or '"') for piece, each in rest)
        self._assign(match[0], [value], word.line)

    def _assign(self, target: str, values: list[str], line: int) -> None:
        name, appends = target.rstrip("+="), target.endswith("+=")
        if name in self.known:
            return
        if not appends or name not in self._values:
            self._values[name] = values
        elif len(values) == 1 and len(self._values[name]) == 1 and not self._is_array(name):
            self._values[name] = [self._values[name][0] + values[0]]
        else:
            self._values[name] = [*self._values[name], *values]

    def _is_array(self, name: str) -> bool:
        return len(self._values[name]) != 1

    def _expand(self, word: Word) -> list[str]:
        """The words that a word becomes."""
        found: list[str] = [""]
        anything = False
        for text, quote in word.pieces:
            if text in ("$@", "${@}", "$*"):  # of a script: what the user adds, which is given to this tool behind --
                positional = sorted((name for name in self._values if name.isdigit() and self._depth), key=int)
                values = [self._values[name][0] for name in positional]
                found[-1:] = [found[-1] + "".join(values[:1]), *values[1:]]
                anything |= bool(values)
                continue
            match = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
            if match and quote == '"' and match[1] in self._values:
                values = list(self._values[match[1]])
                anything |= bool(values)
            else:
                value = self._expand_text(text, quote)
                values = [value] if quote else _split(value)
                anything |= bool(quote) or bool(values)
                if not quote and values and value[:1].isspace() and found[-1]:
                    found.append("")
                ends = not quote and value[-1:].isspace()
                if values and ends:
                    values.append("")
            if values:
                found[-1] += values[0]
                found += values[1:]
        kept = [each for each in found if each] if len(found) > 1 else found
        return kept if anything else []

    def _expand_text(self, text: str, quote: Quote) -> str:
        return text if quote == "'" else _PIECE.sub(lambda match: self._value(match[0]), text)

    def _value(self, piece: str) -> str:
        """The value of an expansion; as it is written, marked, where it is not known."""
        if piece.startswith("\\"):
            return piece[1:]
        if piece.startswith("$(("):
            return self._number(piece[3:-2]) or f"{_OPEN}{piece}{_OPEN}"
        if piece[:2] == "$(" or piece[0] == "`":
            return f"{_OPEN}{piece}{_OPEN}"
        match = _PARAMETER.match(piece) if piece.startswith("${") else re.match(r"\$()(\w+|[@*#?$!-])()()()", piece)
        if match is None:
            return f"{_OPEN}{piece}{_OPEN}"
        prefix, name, index, operation, word = (part or "" for part in match.groups())
        values = self._values.get(name)
        if index and index[1:-1] not in ("@", "*"):
            number = index[1:-1]
            values = [values[int(number)]] if values is not None and number.isdigit() and int(number) < len(values) else None
        if prefix == "#":
            return str(len(values)) if values is not None and index else f"{_OPEN}{piece}{_OPEN}"
        if prefix:
            return f"{_OPEN}{piece}{_OPEN}"
        if operation in (":-", "-", ":=", "="):
            if values is None or (operation.startswith(":") and values == [""]):
                default = self._expand_text(word.strip("\"'"), '"')
                self.defaults[name] = shown(default)
                return default
        elif operation in (":+", "+"):
            if values is None:
                return f"{_OPEN}{piece}{_OPEN}"
            return self._expand_text(word.strip("\"'"), '"') if values != [""] else ""
        if values is None:
            self.unknown.setdefault(name, "an argument of the script" if name.isdigit() else "not set in the script")
            return f"{_OPEN}${name}{_OPEN}"
        value = " ".join(values)
        if re.fullmatch(f"{_OPEN}[^{_OPEN}]*{_OPEN}", value) and not re.fullmatch(r"\d+", name):
            self.unknown[name] = f"{shown(value)} in the script"
            return f"{_OPEN}${name}{_OPEN}"
        return value

    def _number(self, text: str) -> str | None:
        """The value of whole-number arithmetic, or None."""
        text = _PIECE.sub(lambda match: self._value(match[0]), text)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._value(f"${match[0]}"), text)
        if _OPEN in text or not re.fullmatch(r"[\d\s()+*/%-]{1,200}", text):
            return None
        try:
            return str(_calculated(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


_COMPARED = ("=", "==", "!=")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: a - abs(a) // abs(b) * (1 if a * b >= 0 else -1) * b,
}


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise ValueError("no whole-number arithmetic")


def shown(text: str) -> str:
    """A value for the user: what is not known as it is written."""
    return text.replace(_OPEN, "")


def is_known(text: str) -> bool:
    """Whether nothing in a value is unknown."""
    return _OPEN not in text


def _split(value: str) -> list[str]:
    """Split at blanks, but not inside what is not known."""
    return re.findall(f"(?:{_OPEN}[^{_OPEN}]*{_OPEN}|[^\\s{_OPEN}])+", value)


def _joined(words: Sequence[Word | str]) -> list[tuple[list[Word], str]]:
    """Groups of words, each with the && or || behind it."""
    found: list[tuple[list[Word], str]] = [([], "")]
    for word in words:
        text = word if isinstance(word, str) else word.plain
        if text in ("&&", "||", "-a", "-o"):
            found[-1] = (found[-1][0], {"-a": "&&", "-o": "||"}.get(text, text))
            found.append(([], ""))
        elif isinstance(word, Word):
            found[-1][0].append(word)
    # With -a and -o the brackets stand at both ends only.
    bracket = next((word for group, _ in found for word in group if word.plain in ("[", "[[", "test")), None)
    return [([bracket, *group] if bracket is not None and bracket not in group else group, joint) for group, joint in found]


def _closing(tokens: Sequence[Token], at: int, opening: str, closing: str) -> int:
    """The place behind the word that closes the statement at `at`."""
    depth, first = 0, True
    for place in range(at, len(tokens)):
        word = tokens[place].word
        text = word.plain if word is not None and first else ""
        depth += text == opening or (opening in ("for", "while", "until", "select") and text in ("for", "while", "until", "select"))
        if text == closing:
            depth -= 1
            if depth == 0:
                return place + 1
        first = tokens[place].kind == "end" or text in ("then", "do", "else", "{", "!")
    raise ValueError(f"line {tokens[at].line}: {opening} without {closing}")


def _branches(tokens: Sequence[Token]) -> list[tuple[list[Token] | None, list[Token]]]:
    """(condition, body) of an if statement, with None for else."""
    found: list[tuple[list[Token] | None, list[Token]]] = []
    depth, first = 0, True
    condition: list[Token] | None = []
    body: list[Token] | None = None
    for token in tokens:
        text = token.word.plain if token.word is not None and first else ""
        depth += text == "if"
        if depth == 1 and text == "if":
            pass
        elif depth == 1 and text == "then":
            body = []
        elif depth == 1 and text in ("elif", "else"):
            found.append((condition, body or []))
            condition, body = ([], None) if text == "elif" else (None, [])
        elif body is not None:
            body.append(token)
        elif condition is not None:
            condition.append(token)
        depth -= text == "fi"
        first = token.kind == "end" or text in ("then", "else", "if", "elif", "do", "{", "!")
    found.append((condition, body or []))
    return found


def _function(tokens: Sequence[Token], at: int) -> tuple[str, int, int] | None:
    """(name, begin, end) of the body of a function that is defined here."""
    place = at
    word = tokens[at].word
    named = word is not None and word.plain == "function"
    if named:
        place += 1
    name = tokens[place].word
    if name is None or not re.fullmatch(r"[\w-]+", name.plain):
        return None
    following = [
        token.text if token.kind == "end" else token.word.plain if token.word else "" for token in tokens[place + 1 : place + 5]
    ]
    skipped = 2 if following[:2] == ["(", ")"] else 0
    if not skipped and not named:
        return None
    while following[skipped : skipped + 1] == ["\n"]:
        skipped += 1
    if following[skipped : skipped + 1] != ["{"]:
        return None
    begin = place + 2 + skipped
    return name.plain, begin, _closing(tokens, begin - 1, "{", "}") - 1
