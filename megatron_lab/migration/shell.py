"""Interpreter for bash launch scripts, which finds the training commands without running anything.

It understands assignments, arrays, expansions with defaults, integer arithmetic, functions, and conditions whose values follow from
the script. A variable whose value does not follow from the script is *unresolved*: it stays in the command as a variable and is
reported.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from megatron_lab.migration.shell_words import Quote, ShellLexer, Token, Word

_IGNORED_COMMANDS = frozenset(
    "echo printf mkdir rm cp mv ls cd pushd popd export unset set shift wait sleep exit trap tee ulimit module".split()
)
"""Commands that start no training program."""
_BLOCK_KEYWORDS = frozenset(("for", "while", "until", "case", "select"))
"""First keywords of the statements that are not interpreted."""
_CLOSING_KEYWORDS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
"""Keyword that closes each of these statements."""
_MAX_DEPTH = 8
"""Maximum depth of nested function calls and ``bash -c`` commands."""
_PARAMETER = re.compile(r"\$\{(!?#?)(\w+|[@*])(\[[@*\w]+\])?(?:(:?[-=+?])(.*))?\}\Z", re.DOTALL)
"""Expansion ``${...}``: prefix (``!``, ``#``), name, subscript, operator and alternative text."""
_EXPANSION = re.compile(r"\\[$`]|\$\(\((?s:.*?)\)\)|\$\((?s:.*)\)|\$\{[^{}]*(?:\$?\{[^{}]*\}[^{}]*)*\}|\$(?:\w+|[@*#?$!-])|`[^`]*`")
"""Escaped ``$`` or backtick, or an expansion: arithmetic, output of a command, parameter."""
_MARK = "\0"
"""Character before and after an unresolved part of a value."""


@dataclass(frozen=True)
class Launch:
    """Command of a script that starts a Python program with flags, such as a training program."""

    launcher: tuple[str, ...]
    """Program that starts the Python program, with its arguments, such as torchrun and its flags."""
    program: str
    argv: tuple[str, ...]
    """Arguments of the Python program."""
    lineno: int
    """Line number of the command in the script."""


@dataclass
class Script:
    """Interpreter of a bash script, with the results of the interpretation.

    Args:
        overrides: values of variables that replace the assignments in the script, by name. The names 1, 2 and so on stand for the
            arguments of the script.
    """

    overrides: Mapping[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    """Commands that start Python programs with flags, in the order of the script."""
    written_files: dict[str, str] = field(default_factory=dict)
    """Content of each file that the script writes from a here-document, by file name."""
    skipped: list[str] = field(default_factory=list)
    """Messages about statements that the interpreter skipped, for the user."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Default value, by variable name, of each variable for which an expansion such as ``${NAME:-8}`` used its default."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """Origin of the value of each variable whose value does not follow from the script, as a text for messages."""

    def __post_init__(self) -> None:
        self._values: dict[str, list[str]] = {name: [value] for name, value in self.overrides.items()}
        self._functions: dict[str, list[Token]] = {}
        self._depth = 0

    def interpret(self, text: str, lineno: int = 1) -> Script:
        """Interpret a script, store the results in this object, and return the object.

        Args:
            lineno: line number of the first line, for messages.

        Raises:
            ValueError: a quote, a bracket or a statement is not closed.
        """
        self._run(ShellLexer(text, lineno).tokenize())
        return self

    # ---- commands

    def _run(self, tokens: Sequence[Token]) -> None:
        index = 0
        while index < len(tokens):
            index = self._run_command(tokens, index)

    def _run_command(self, tokens: Sequence[Token], start: int) -> int:
        """Interpret the statement that starts at a token. Return the index of the token after the statement."""
        first = tokens[start]
        word = first.word.unquoted_text if first.word is not None else ""
        if first.type == "end":
            return start + 1
        if word == "if":
            return self._run_if(tokens, start)
        if word in _BLOCK_KEYWORDS:
            end = _find_end(tokens, start, word, _CLOSING_KEYWORDS[word])
            self._record_skipped(tokens[start:end], f"a {word} loop" if word != "case" else "a choice (case)")
            return end
        if word in ("{", "}", "then", "do", "done", "fi", "!", "time", "exec", "eval", "nohup", "sudo"):
            return start + 1
        if (body := _find_function_body(tokens, start)) is not None:
            name, body_start, end = body
            self._functions[name] = list(tokens[body_start:end])
            return end + 1
        end = next(i for i in range(start, len(tokens)) if tokens[i].type == "end")
        self._run_simple_command(tokens[start:end], tokens[end])
        return end + 1

    def _run_simple_command(self, tokens: Sequence[Token], end: Token) -> None:
        """Interpret a command that is not a compound statement such as if. It may assign variables, call a function or start a
        program.

        Args:
            tokens: words and array assignments of the command.
            end: token that ends the command.
        """
        argv: list[str] = []
        for token in tokens:
            if token.type == "array":
                self._assign(token.text, [value for word in token.items for value in self._expand_word(word)], token.lineno)
            elif token.word is not None and not argv and (match := re.match(r"([A-Za-z_]\w*)(\+?=)", token.word.text)):
                self._assign_word(token.word, match)
            elif token.word is not None:
                if argv and argv[0] in ("export", "local", "declare", "readonly", "typeset"):
                    if match := re.match(r"([A-Za-z_]\w*)(\+?=)", token.word.text):
                        self._assign_word(token.word, match)
                    continue
                argv += self._expand_word(token.word)
        if end.here_document is not None:
            text = "".join(self._expand_text(fragment, quote) for fragment, quote in end.here_document.fragments)
            self.written_files.update({"".join(self._expand_word(target)): text for target in end.output_files})
        if argv and argv[0] in ("source", "."):
            self.skipped.append(f"line {tokens[0].lineno}: {remove_marks(' '.join(argv))} reads another file, which is skipped")
        elif argv and argv[0] in self._functions and self._depth < _MAX_DEPTH:
            self._call_function(argv[0], argv[1:])
        elif argv and argv[0] not in _IGNORED_COMMANDS:
            self._record_launch(argv, tokens[0].lineno)

    def _call_function(self, name: str, args: Sequence[str]) -> None:
        """Interpret the body of a function of the script, with `args` as $1, $2 and so on. The caller's arguments are restored
        afterwards."""
        previous = dict(self._values)
        self._values.update({str(i): [arg] for i, arg in enumerate(args, start=1)})
        self._depth += 1
        self._run(self._functions[name])
        self._depth -= 1
        for i in range(1, len(args) + 1):
            self._values.pop(str(i))
            if str(i) in previous:
                self._values[str(i)] = previous[str(i)]

    def _record_launch(self, argv: Sequence[str], lineno: int) -> None:
        """Record a command if it starts a Python program with flags. If the command is ``bash -c``, interpret its script
        instead."""
        if "-c" in argv and self._depth < _MAX_DEPTH:
            option_index = argv.index("-c")
            if option_index and PurePosixPath(argv[option_index - 1]).name in ("bash", "sh") and option_index + 1 < len(argv):
                self._depth += 1
                self._run(ShellLexer(argv[option_index + 1], lineno).tokenize())
                self._depth -= 1
                return
        for i, word in enumerate(argv):
            is_program = word.endswith(".py") and any(arg.startswith("--") for arg in argv[i + 1 :])
            if is_program and not word.startswith("-"):
                self.launches.append(Launch(tuple(argv[:i]), word, tuple(argv[i + 1 :]), lineno))
                return

    def _run_if(self, tokens: Sequence[Token], start: int) -> int:
        """Interpret the first branch of an if statement whose condition is true. Return the index of the token after the statement.

        If the value of a condition does not follow from the script, no further branch is interpreted.

        Args:
            tokens: tokens of the script.
            start: index of the token ``if``.
        """
        end = _find_end(tokens, start, "if", "fi")
        branches = _split_branches(tokens[start : end - 1])
        for condition, body in branches:
            result = True if condition is None else self._evaluate_condition(condition)
            if result:
                self._run(body)
                break
            if result is None:
                condition_text = remove_marks(" ".join(token.word.text for token in condition or () if token.word is not None))
                self._record_skipped([token for _, branch in branches for token in branch], f"the condition {condition_text}")
                break
        return end

    def _record_skipped(self, tokens: Sequence[Token], statement: str) -> None:
        """Add a message about a skipped statement if the statement sets variables or starts Python programs.

        Args:
            tokens: tokens of the statement.
            statement: description of the statement for the message.
        """
        names = {token.text.rstrip("+=") for token in tokens if token.type == "array"}
        names |= {match[1] for token in tokens if token.word and (match := re.match(r"([A-Za-z_]\w*)\+?=", token.word.text))}
        programs = {token.word.text for token in tokens if token.word is not None and token.word.text.endswith(".py")}
        if names or programs:
            effect = f"sets {', '.join(sorted(names))}" if names else f"starts {', '.join(sorted(programs))}"
            self.skipped.append(
                f"line {tokens[0].lineno}: {statement} cannot be evaluated from the script alone; it {effect} and is skipped"
            )

    # ---- conditions

    def _evaluate_condition(self, tokens: Sequence[Token]) -> bool | None:
        """Evaluate the condition of an if statement. Return None if its value does not follow from the script."""
        items: list[Word | str] = []
        for token in tokens:
            if token.word is not None:
                items.append(token.word)
            elif token.text in ("&&", "||"):
                items.append(token.text)
        result: bool | None = None
        operation = ""
        for group, next_operation in _split_condition(items):
            group_result = self._evaluate_test(group)
            if operation == "&&":
                result = False if result is False or group_result is False else None if None in (result, group_result) else True
            elif operation == "||":
                result = True if result or group_result else None if None in (result, group_result) else False
            else:
                result = group_result
            operation = next_operation
        return result

    def _evaluate_test(self, test: Sequence[Word]) -> bool | None:
        """Evaluate a test in brackets, without ``&&`` and ``||``.

        Return None if the value does not follow from the script, or if this form of test is not supported.
        """
        operands = [word for word in test if word.unquoted_text not in ("[", "[[", "]", "]]", "test")]
        if len(operands) == len(test):
            return None
        is_negated = bool(operands) and operands[0].unquoted_text == "!"
        values = [
            "".join(self._expand_text(text, quote or '"') for text, quote in word.fragments) for word in operands[is_negated:]
        ]
        if any(_MARK in value for value in values):
            return None
        result: bool | None = None
        if len(values) == 3 and values[1] in _STRING_COMPARISONS:
            result = values[0] == values[2] if values[1] in ("=", "==") else values[0] != values[2]
        elif len(values) == 3 and values[1] in _INTEGER_COMPARISONS and all(re.fullmatch(r"-?\d+", values[i]) for i in (0, 2)):
            result = _INTEGER_COMPARISONS[values[1]](int(values[0]), int(values[2]))
        elif len(values) == 2 and values[0] in ("-n", "-z"):
            result = bool(values[1]) == (values[0] == "-n")
        elif len(values) == 1:
            result = bool(values[0])
        return result if result is None else result != is_negated

    # ---- values

    def _assign_word(self, word: Word, match: re.Match[str]) -> None:
        """Interpret a word that assigns a text to a variable, such as ``NAME="text"``.

        Args:
            word: the complete assignment.
            match: match of the name and the operator (``=`` or ``+=``) at the start of the word.
        """
        text, quote = word.fragments[0]
        fragments = [(text[match.end() :], quote), *word.fragments[1:]]
        value = "".join(self._expand_text(fragment, fragment_quote or '"') for fragment, fragment_quote in fragments)
        self._assign(match[0], [value], word.lineno)

    def _assign(self, target: str, values: list[str], lineno: int) -> None:
        """Set a variable or append to it. A variable with a value in `overrides` is not changed.

        Args:
            target: name with the operator ``=`` or ``+=``.
            values: one text, or the elements of an array.
        """
        name, is_append = target.rstrip("+="), target.endswith("+=")
        if name in self.overrides:
            return
        if not is_append or name not in self._values:
            self._values[name] = values
        elif len(values) == 1 and len(self._values[name]) == 1 and not self._is_array(name):
            self._values[name] = [self._values[name][0] + values[0]]
        else:
            self._values[name] = [*self._values[name], *values]

    def _is_array(self, name: str) -> bool:
        return len(self._values[name]) != 1

    def _expand_word(self, word: Word) -> list[str]:
        """Return the arguments that a word of a command gives: unquoted values are split at blanks, a quoted array gives its
        elements."""
        args: list[str] = [""]
        has_value = False
        for text, quote in word.fragments:
            if text in ("$@", "${@}", "$*"):  # empty outside functions: the user adds flags after -- of this tool
                positional = sorted((name for name in self._values if name.isdigit() and self._depth), key=int)
                values = [self._values[name][0] for name in positional]
                args[-1:] = [args[-1] + "".join(values[:1]), *values[1:]]
                has_value |= bool(values)
                continue
            array_match = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
            if array_match and quote == '"' and array_match[1] in self._values:
                values = list(self._values[array_match[1]])
                has_value |= bool(values)
            else:
                value = self._expand_text(text, quote)
                values = [value] if quote else _split_at_blanks(value)
                has_value |= bool(quote) or bool(values)
                if not quote and values and value[:1].isspace() and args[-1]:
                    args.append("")
                ends_with_blank = not quote and value[-1:].isspace()
                if values and ends_with_blank:
                    values.append("")
            if values:
                args[-1] += values[0]
                args += values[1:]
        nonempty = [arg for arg in args if arg] if len(args) > 1 else args
        return nonempty if has_value else []

    def _expand_text(self, text: str, quote: Quote) -> str:
        """Replace expansions such as ``$NAME`` in a text by their values. A text in single quotes stays unchanged."""
        return text if quote == "'" else _EXPANSION.sub(lambda match: self._expand_variable(match[0]), text)

    def _expand_variable(self, expansion: str) -> str:
        """Return the value of an expansion such as ``$NAME`` or ``${NAME:-8}``.

        If the value does not follow from the script, return the expansion between two NUL characters, which mark it as unresolved.
        """
        if expansion.startswith("\\"):
            return expansion[1:]
        if expansion.startswith("$(("):
            return self._expand_arithmetic(expansion[3:-2]) or f"{_MARK}{expansion}{_MARK}"
        if expansion[:2] == "$(" or expansion[0] == "`":
            return f"{_MARK}{expansion}{_MARK}"
        match = _PARAMETER.match(expansion) if expansion.startswith("${") else re.match(r"\$()(\w+|[@*#?$!-])()()()", expansion)
        if match is None:
            return f"{_MARK}{expansion}{_MARK}"
        prefix, name, subscript, expansion_operator, alternative = (group or "" for group in match.groups())
        values = self._values.get(name)
        if subscript and subscript[1:-1] not in ("@", "*"):
            element = subscript[1:-1]
            values = [values[int(element)]] if values is not None and element.isdigit() and int(element) < len(values) else None
        if prefix == "#":
            return str(len(values)) if values is not None and subscript else f"{_MARK}{expansion}{_MARK}"
        if prefix:
            return f"{_MARK}{expansion}{_MARK}"
        if expansion_operator in (":-", "-", ":=", "="):
            if values is None or (expansion_operator.startswith(":") and values == [""]):
                default = self._expand_text(alternative.strip("\"'"), '"')
                self.defaults[name] = remove_marks(default)
                return default
        elif expansion_operator in (":+", "+"):
            if values is None:
                return f"{_MARK}{expansion}{_MARK}"
            return self._expand_text(alternative.strip("\"'"), '"') if values != [""] else ""
        if values is None:
            self.unresolved.setdefault(name, "an argument of the script" if name.isdigit() else "not set in the script")
            return f"{_MARK}${name}{_MARK}"
        value = " ".join(values)
        if re.fullmatch(f"{_MARK}[^{_MARK}]*{_MARK}", value) and not re.fullmatch(r"\d+", name):
            self.unresolved[name] = f"{remove_marks(value)} in the script"
            return f"{_MARK}${name}{_MARK}"
        return value

    def _expand_arithmetic(self, text: str) -> str | None:
        """Return the result of integer arithmetic such as ``$((8 * N))`` as text.

        Return None if the value does not follow from the script, or if the form is not supported.

        Args:
            text: expression with its parentheses.
        """
        text = _EXPANSION.sub(lambda match: self._expand_variable(match[0]), text)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._expand_variable(f"${match[0]}"), text)
        if _MARK in text or not re.fullmatch(r"[\d\s()+*/%-]{1,200}", text):
            return None
        try:
            return str(_evaluate(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None


_STRING_COMPARISONS = ("=", "==", "!=")
"""Operators of tests that compare texts."""
_INTEGER_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
"""Operators of tests that compare integers."""
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1),
    ast.Mod: lambda a, b: a - abs(a) // abs(b) * (1 if a * b >= 0 else -1) * b,
}
"""Integer arithmetic of bash: division truncates toward zero."""


def _evaluate(node: ast.expr) -> int:
    """Evaluate an integer expression of bash that was parsed as a Python expression. Division truncates toward zero, as in bash."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(
        f"the shell expression {ast.unparse(node)} cannot be evaluated, because it is not integer arithmetic. "
        "Replace it by its value"
    )


def remove_marks(text: str) -> str:
    """Remove the NUL characters around unresolved expansions (those whose value is unknown) from a value, to show it to the
    user."""
    return text.replace(_MARK, "")


def is_resolved(text: str) -> bool:
    """Return whether a value contains no unresolved expansion, such as a variable whose value does not follow from the script."""
    return _MARK not in text


def _split_at_blanks(value: str) -> list[str]:
    """Split a value at blanks. Blanks within an unresolved expansion (one whose value is unknown) do not count."""
    return re.findall(f"(?:{_MARK}[^{_MARK}]*{_MARK}|[^\\s{_MARK}])+", value)


def _split_condition(items: Sequence[Word | str]) -> list[tuple[list[Word], str]]:
    """Split the condition of an if statement into its tests.

    Args:
        items: words of the condition, and its operators ``&&`` and ``||`` as texts.

    Returns:
        Words of each test, with the operator after the test (empty for the last test). ``-a`` and ``-o`` in brackets are returned
        as ``&&`` and ``||``.
    """
    groups: list[tuple[list[Word], str]] = [([], "")]
    for item in items:
        text = item if isinstance(item, str) else item.unquoted_text
        if text in ("&&", "||", "-a", "-o"):
            groups[-1] = (groups[-1][0], {"-a": "&&", "-o": "||"}.get(text, text))
            groups.append(([], ""))
        elif isinstance(item, Word):
            groups[-1][0].append(item)
    # With -a and -o, one pair of brackets encloses all tests.
    bracket = next((item for group, _ in groups for item in group if item.unquoted_text in ("[", "[[", "test")), None)
    return [
        ([bracket, *group] if bracket is not None and bracket not in group else group, operation) for group, operation in groups
    ]


def _find_end(tokens: Sequence[Token], start: int, opening: str, closing: str) -> int:
    """Return the index of the token after the keyword that closes a statement, such as ``fi``. Nested statements are skipped.

    Args:
        tokens: tokens of the script.
        start: index of the first token of the statement.
        opening: first keyword of the statement.
        closing: keyword that closes the statement.
    """
    depth, is_command_start = 0, True
    for i in range(start, len(tokens)):
        word = tokens[i].word
        text = word.unquoted_text if word is not None and is_command_start else ""
        depth += text == opening or (opening in ("for", "while", "until", "select") and text in ("for", "while", "until", "select"))
        if text == closing:
            depth -= 1
            if depth == 0:
                return i + 1
        is_command_start = tokens[i].type == "end" or text in ("then", "do", "else", "{", "!")
    raise ValueError(
        f"line {tokens[start].lineno}: the statement {opening} of the script has no {closing}. Add the missing {closing}"
    )


def _split_branches(tokens: Sequence[Token]) -> list[tuple[list[Token] | None, list[Token]]]:
    """Return (condition, body) for each branch of an if statement, as lists of tokens. The condition of the ``else`` branch is
    None."""
    branches: list[tuple[list[Token] | None, list[Token]]] = []
    depth, is_command_start = 0, True
    condition: list[Token] | None = []
    body: list[Token] | None = None
    for token in tokens:
        text = token.word.unquoted_text if token.word is not None and is_command_start else ""
        depth += text == "if"
        if depth == 1 and text == "if":
            pass
        elif depth == 1 and text == "then":
            body = []
        elif depth == 1 and text in ("elif", "else"):
            branches.append((condition, body or []))
            condition, body = ([], None) if text == "elif" else (None, [])
        elif body is not None:
            body.append(token)
        elif condition is not None:
            condition.append(token)
        depth -= text == "fi"
        is_command_start = token.type == "end" or text in ("then", "else", "if", "elif", "do", "{", "!")
    branches.append((condition, body or []))
    return branches


def _find_function_body(tokens: Sequence[Token], start: int) -> tuple[str, int, int] | None:
    """Find the body of a function whose definition starts at token `start`.

    Returns:
        Name of the function, index of the first token of the body, and index of the closing brace. None if no function definition
        starts at this token.
    """
    index = start
    word = tokens[start].word
    has_keyword = word is not None and word.unquoted_text == "function"
    if has_keyword:
        index += 1
    name = tokens[index].word
    if name is None or not re.fullmatch(r"[\w-]+", name.unquoted_text):
        return None
    next_texts = [
        token.text if token.type == "end" else token.word.unquoted_text if token.word else ""
        for token in tokens[index + 1 : index + 5]
    ]
    skipped = 2 if next_texts[:2] == ["(", ")"] else 0
    if not skipped and not has_keyword:
        return None
    while next_texts[skipped : skipped + 1] == ["\n"]:
        skipped += 1
    if next_texts[skipped : skipped + 1] != ["{"]:
        return None
    body_start = index + 2 + skipped
    return name.unquoted_text, body_start, _find_end(tokens, body_start - 1, "{", "}") - 1
