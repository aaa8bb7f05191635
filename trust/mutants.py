"""Small changes of code, all compiled in at once: a number in the environment says which of them is active.

    a < b                    (M(17) ? (a <= b) : (a < b))            C++
    table.clear()            if not M(18): table.clear()             Python

So the engine is built once for hundreds of mutants. `M` also notes that it was asked, which tells the tests
that reach a mutant from those that cannot notice it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# ---- C++

CPP_SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "%": "/",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "&&": "||",
    "||": "&&",
}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}
STATEMENT_SWAPS = {"+=": "-=", "-=": "+=", "|=": "&=", "&=": "|="}
ENDS = {";", ",", "?", ":", "return", "throw", "else", "do", "case"} | ASSIGNMENTS
OPEN, CLOSE = {"(", "[", "{"}, {")", "]", "}"}
KEYWORDS = {"if", "for", "while", "switch", "return", "delete", "throw", "using", "static_assert", "new"}
# Without these calls the program is slower, and nothing else.
ONLY_FASTER = re.compile(
    r"prefetch|reserve|shrink_to_fit|advise|assert|Assert|yield|pause|Check", re.IGNORECASE
)
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<space>\s+)
      | (?P<line>^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*)
      | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
      | (?P<number>(?:0[xX][0-9a-fA-F']+|\d[\d']*(?:\.\d*)?(?:[eE][-+]?\d+)?)[uUlLfFzZ]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<sign>::|->|<<=|>>=|<=>|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|\+=|-=|\*=|/=|%=|&=|\|=|\^=|.)
""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Mutant:
    """A change of one place. `changed` replaces the text between start and end; None drops the statement."""

    file: str
    line: int
    change: str  # for people
    code: str  # the line as it is
    start: int
    end: int
    changed: str | None
    statement: bool = False

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


def tokens_of(text: str) -> list[Token]:
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind not in ("comment", "line", "space"):
            found.append(Token(kind, match.group(), match.start(), match.end()))
    return found


def _expression(tokens: list[Token], at: int) -> tuple[int, int]:
    """First and last token of the expression around an operator: up to brackets, commas, assignments."""
    first = at
    depth = 0
    while first > 0:
        text = tokens[first - 1].text
        if depth == 0 and (text in ENDS or text in OPEN):
            break
        depth += (text in CLOSE) - (text in OPEN)
        first -= 1
    last = at
    depth = 0
    while last + 1 < len(tokens):
        text = tokens[last + 1].text
        if depth == 0 and (text in ENDS or text in CLOSE):
            break
        depth += (text in OPEN) - (text in CLOSE)
        last += 1
    return first, last


def _statement(tokens: list[Token], at: int) -> tuple[int, int] | None:
    """First and last token of the statement that a token is in; None where it is no plain one."""
    first = at
    while first > 0 and tokens[first - 1].text not in (";", "{", "}"):
        first -= 1
    last, depth = at, 0
    while last < len(tokens) and not (tokens[last].text == ";" and depth == 0):
        depth += (tokens[last].text in OPEN) - (tokens[last].text in CLOSE)
        if depth < 0:
            return None
        last += 1
    if last == len(tokens) or tokens[first].text in KEYWORDS or tokens[first].kind != "name":
        return None
    return first, last


def _closing(tokens: list[Token], opening: int) -> int:
    depth = 0
    for at in range(opening, len(tokens)):
        depth += (tokens[at].text in OPEN) - (tokens[at].text in CLOSE)
        if depth == 0:
            return at
    return len(tokens) - 1


def cpp_mutants(file: str, text: str) -> Iterator[Mutant]:
    tokens = tokens_of(text)
    lines = text.splitlines()

    def make(
        at: int, first: int, last: int, change: str, edit: str | None, statement: bool = False
    ) -> Mutant:
        start, end = tokens[first].start, tokens[last].end
        changed = None
        if edit is not None:
            token = tokens[at]
            changed = _plain(text[start : token.start]) + edit + _plain(text[token.end : end])
        line = text.count("\n", 0, tokens[at].start) + 1
        return Mutant(file, line, change, lines[line - 1].strip(), start, end, changed, statement)

    thrown = False  # messages of errors are no behaviour
    for at, token in enumerate(tokens):
        thrown = token.text == "throw" or (thrown and token.text != ";")
        if thrown:
            continue
        around = text[token.start - 1 : token.start] + text[token.end : token.end + 1]
        apart = len(around) == 2 and around.isspace()
        if token.kind == "sign" and apart and token.text in CPP_SWAPS:
            other = CPP_SWAPS[token.text]
            yield make(at, *_expression(tokens, at), f"{token.text} becomes {other}", other)
        elif token.text in STATEMENT_SWAPS and (found := _statement(tokens, at)):
            other = STATEMENT_SWAPS[token.text]
            yield make(at, *found, f"{token.text} becomes {other}", other, True)
        elif token.text == "!" and not text[token.end].isspace():
            yield make(at, at, at, "! is dropped", "")
        elif token.kind == "number" and "." not in token.text and "f" not in token.text.lower()[2:]:
            yield make(at, at, at, f"{token.text} becomes {token.text} + 1", f"({token.text} + 1)")
        elif token.text in ("true", "false"):
            other = "false" if token.text == "true" else "true"
            yield make(at, at, at, f"{token.text} becomes {other}", other)
        elif token.text in ("min", "max") and at > 1 and tokens[at - 1].text == "::":
            opening = at + 1
            while opening < len(tokens) and tokens[opening].text not in ("(", ";"):
                opening += 1
            if tokens[opening].text == "(":
                other = "max" if token.text == "min" else "min"
                last = _closing(tokens, opening)
                yield make(at, at - 2, last, f"{token.text} becomes {other}", other)
        elif token.kind == "name" and at > 0 and tokens[at - 1].text in (";", "{", "}"):
            if (last := _call(tokens, at)) is not None:
                called = text[token.start : tokens[at + 1].end] if tokens[at + 1].text != "(" else token.text
                if not ONLY_FASTER.search(text[token.start : tokens[last].end].split("(")[0]):
                    yield make(at, at, last, f"call of {called.rstrip('(.')} is dropped", None, True)


def _call(tokens: list[Token], at: int) -> int | None:
    """The last token of a statement that only calls something; None when it is another statement."""
    if tokens[at].text in KEYWORDS:
        return None
    end = at
    while end + 1 < len(tokens):
        text = tokens[end + 1].text
        if text == "(" or text == "[":
            end = _closing(tokens, end + 1)
        elif text in (".", "->", "::") and tokens[end + 2].kind == "name":
            end += 2
        else:
            break
    return end + 1 if tokens[end].text == ")" and tokens[end + 1].text == ";" else None


def _plain(text: str) -> str:
    """Without comments and line breaks, so that lines keep their numbers."""
    return re.sub(r"\s*\n\s*", " ", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL))


def with_cpp_mutants(text: str, numbered: dict[int, Mutant]) -> str:
    """The source with a choice at the place of each mutant. Lines keep their numbers."""
    order = sorted(numbered.items(), key=lambda item: (item[1].start, -item[1].end, item[0]))

    def render(start: int, end: int, inside: list[tuple[int, Mutant]]) -> str:
        parts, at = [], start
        while inside:
            number, mutant = inside[0]
            within = [item for item in inside[1:] if item[1].end <= mutant.end]
            inner = render(mutant.start, mutant.end, within)
            if mutant.statement:
                other = "" if mutant.changed is None else mutant.changed
                choice = f"{{ if (EMBSTORE_MUTANT({number})) {{ {other} }} else {{ {inner} }} }}"
            elif mutant.change == "! is dropped":
                choice = f"EMBSTORE_MUTANT({number}) != {inner}"
            else:
                choice = f"(EMBSTORE_MUTANT({number}) ? ({mutant.changed}) : ({inner}))"
            parts += [text[at : mutant.start], choice]
            at = mutant.end
            inside = [item for item in inside[1:] if item[1].start >= mutant.end]
        return "".join(parts) + text[at:end]

    return '#include "embstore/mutant.h"\n#line 1\n' + render(0, len(text), order)


# ---- Python

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not", ast.Add: "+", ast.Sub: "-", ast.Mult: "*",
    ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "%", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&",
    ast.BitOr: "|",
}  # fmt: skip


class _Rewriter(ast.NodeTransformer):
    """Lists the mutants of a module, and puts those that `choose` gives a number for into it."""

    def __init__(self, file: str, text: str, choose: Callable[[Mutant], int | None]) -> None:
        self._file, self._lines, self._choose = file, text.splitlines(), choose
        self.found: list[Mutant] = []

    def _offer(self, node: ast.AST, change: str, statement: bool = False) -> int | None:
        line = node.lineno  # type: ignore[attr-defined]
        code = self._lines[line - 1].strip()
        column = node.col_offset  # type: ignore[attr-defined]
        mutant = Mutant(self._file, line, change, code, column, column, None, statement)
        self.found.append(mutant)
        return self._choose(mutant)

    def _choice(self, number: int, changed: ast.expr, node: ast.expr) -> ast.expr:
        asked = ast.Call(ast.Name("EMBSTORE_MUTANT", ast.Load()), [ast.Constant(number)], [])
        return ast.IfExp(asked, changed, node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        before = ast.unparse(node)
        changed: ast.expr = ast.parse(before, mode="eval").body
        sign, other = type(node.ops[0]), COMPARISONS[type(node.ops[0])]
        number = self._offer(node, f"{SIGNS[sign]} becomes {SIGNS[other]}")
        self.generic_visit(node)
        if number is None:
            return node
        assert isinstance(changed, ast.Compare)
        changed.ops[0] = other()
        return self._choice(number, changed, node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        textual = any(isinstance(side, (ast.JoinedStr, ast.Constant)) and not _is_number(side)
                      for side in (node.left, node.right))  # fmt: skip
        if type(node.op) not in ARITHMETIC or textual:
            self.generic_visit(node)
            return node
        changed = ast.parse(ast.unparse(node), mode="eval").body
        sign, other = type(node.op), ARITHMETIC[type(node.op)]
        number = self._offer(node, f"{SIGNS[sign]} becomes {SIGNS[other]}")
        self.generic_visit(node)
        if number is None:
            return node
        assert isinstance(changed, ast.BinOp)
        changed.op = other()
        return self._choice(number, changed, node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        changed = ast.parse(ast.unparse(node), mode="eval").body
        number = self._offer(node, "and becomes or" if isinstance(node.op, ast.And) else "or becomes and")
        self.generic_visit(node)
        if number is None:
            return node
        assert isinstance(changed, ast.BoolOp)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._choice(number, changed, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if not isinstance(node.op, ast.Not):
            self.generic_visit(node)
            return node
        changed = ast.parse(ast.unparse(node.operand), mode="eval").body
        number = self._offer(node, "not is dropped")
        self.generic_visit(node)
        return node if number is None else self._choice(number, changed, node)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, bool):
            changed, change = ast.Constant(not node.value), f"{node.value} becomes {not node.value}"
        elif isinstance(node.value, int):
            changed, change = ast.Constant(node.value + 1), f"{node.value} becomes {node.value + 1}"
        else:
            return node
        number = self._offer(node, change)
        return node if number is None else self._choice(number, changed, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        changed = None
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            changed = ast.parse(ast.unparse(node), mode="eval").body
            number = self._offer(node, f"{node.func.id} becomes {CALLS[node.func.id]}")
        self.generic_visit(node)
        if changed is None or number is None:
            return node
        assert isinstance(changed, ast.Call) and isinstance(changed.func, ast.Name)
        changed.func.id = CALLS[changed.func.id]
        return self._choice(number, changed, node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not isinstance(node.value, ast.Call):
            return node  # a docstring
        name = ast.unparse(node.value.func)
        number = None
        if not ONLY_FASTER.search(name) and "warn" not in name:
            number = self._offer(node, f"call of {name} is dropped", True)
        self.generic_visit(node)
        if number is None:
            return node
        asked = ast.Call(ast.Name("EMBSTORE_MUTANT", ast.Load()), [ast.Constant(number)], [])
        return ast.If(ast.UnaryOp(ast.Not(), asked), [node], [])

    # What is no behaviour: annotations, messages, and asserts, which are about our own bugs.
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        return node if "TYPE_CHECKING" in ast.unparse(node.test) else self._generic(node)

    def _generic(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.args = self.visit(node.args)
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def python_mutants(file: str, text: str) -> list[Mutant]:
    rewriter = _Rewriter(file, text, lambda mutant: None)
    rewriter.visit(ast.parse(text))
    return rewriter.found


def with_python_mutants(file: str, text: str, numbers: dict[Mutant, int]) -> str:
    """The module with a choice at the place of each mutant."""
    tree = _Rewriter(file, text, numbers.get).visit(ast.parse(text))
    at = 0
    while at < len(tree.body) and (
        isinstance(tree.body[at], ast.Expr) or getattr(tree.body[at], "module", "") == "__future__"
    ):
        at += 1
    tree.body[at:at] = ast.parse("from embstore_mutant import EMBSTORE_MUTANT").body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
