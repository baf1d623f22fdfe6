"""Finds waits without a bound in Python source, by syntax alone. `test_bounded_waits.py` shows by example what counts.

A wait is bounded by a time it is given, or by `async with asyncio.timeout(…)` or `asyncio.wait_for(…, seconds)` around
it in the same function. Any other needs a comment on its line or right above: `# bounded by: …` names what ends it,
`# unbounded: …` says why it may last for ever. A comment that stands at no such wait is reported, too.

Calls of gRPC stubs count as bounded: `vime_client.channel.open_channel` gives each call a deadline, and nothing else
may open a channel (`test_bounded_waits.py` checks both). So do collectives: a process group must have a time-out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_EXCUSE = re.compile(r"#\s*(?:unbounded|bounded by):\s*(.*)")
_LEAST_REASON = 12

# Methods that wait until something happens, unless they are given a time: the position of that time, None for keyword.
_WAITS: dict[str, int | None] = {
    "wait": 0,  # events, conditions, processes, barriers, works of a process group
    "wait_for": 1,  # conditions
    "join": 0,  # threads, processes, queues
    "acquire": 1,  # locks, semaphores
    "communicate": 1,  # processes
    "wait_for_termination": 0,  # gRPC servers
    "channel_ready": None,  # gRPC channels
    "wait_closed": None,  # asyncio's servers and streams
}
_WAITS_WITHOUT_ARGUMENTS = ("get", "result", "recv", "recv_bytes", "accept", "select")
_FUNCTIONS: dict[str, int | None] = {
    "asyncio.wait": 1,
    "asyncio.wait_for": 1,
    "subprocess.run": None,
    "subprocess.call": None,
    "subprocess.check_call": None,
    "subprocess.check_output": None,
    "socket.create_connection": 1,
    "urllib.request.urlopen": 2,
    "select.select": 3,
    "dist.init_process_group": None,
    "torch.distributed.init_process_group": None,
}
_FUNCTIONS_WITH_FLAG = {"os.waitpid": ("WNOHANG",), "fcntl.flock": ("LOCK_NB", "LOCK_UN")}
_OTHER_PROCESSES = ("_llm",)
"""Attributes that stand for another process: awaiting any of their methods waits for it."""
_SLEEPS = re.compile(r"^(asyncio|time|.*clock)\.sleep$")


@dataclass(frozen=True)
class Finding:
    """A wait without a bound, or a comment that excuses nothing."""

    line: int
    what: str


def unbounded_waits(source: str) -> list[Finding]:
    """Every wait without a bound or an excuse, and every excuse without a wait or a reason."""
    lines = source.splitlines()
    excuses = {n: found.group(1).strip() for n, text in enumerate(lines, start=1) if (found := _EXCUSE.search(text))}
    used: set[int] = set()
    findings = []
    for found in _Finder(ast.parse(source)).find():
        excuse = _excuse_for(found.line, excuses, lines)
        if excuse is None:
            findings.append(found)
        else:
            used.add(excuse)
    for line, reason in excuses.items():
        if len(reason) < _LEAST_REASON and not (reason == "as above" and line > min(excuses)):
            findings.append(Finding(line, f"{reason!r} is no reason"))
        elif line not in used:
            findings.append(Finding(line, "excuses a wait that is not there"))
    return sorted(findings, key=lambda finding: finding.line)


def _excuse_for(line: int, excuses: Iterable[int], lines: list[str]) -> int | None:
    """The line of the excuse: the wait's own, or one of the comment lines right above it."""
    while line not in excuses:
        line -= 1
        if line < 1 or not lines[line - 1].lstrip().startswith("#"):
            return None
    return line


@dataclass(frozen=True)
class _Scope:
    """What is known on the way down to a node."""

    bounded: bool = False
    in_async: bool = False


class _Finder:
    """Walks one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._found: list[Finding] = []
        made = _made_by(tree)
        self._context_variables = made(lambda call: _dotted(call.func).endswith("ContextVar"))
        self._timed_barriers = made(lambda call: _dotted(call.func).endswith("Barrier") and not _untimed(call, 2))
        self._simple_queues = made(lambda call: _dotted(call.func).endswith("SimpleQueue"))
        self._executors = made(_is_executor)

    def find(self) -> list[Finding]:
        """Each wait without a bound."""
        self._visit(self._tree, _Scope())
        return self._found

    # -------------------------------------------------------------- the way down

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.Lambda():
                scope = _Scope()
            case ast.AsyncFunctionDef():
                scope = _Scope(in_async=True)
            case ast.AsyncWith():
                self._visit_with(node, scope)
                return
            case ast.With():
                for item in node.items:
                    if isinstance(item.context_expr, ast.Call) and _is_executor(item.context_expr):
                        self._report(node, "leaving the block waits for the executor's threads")
            case ast.While() if not scope.bounded and all(_only_sleeps(statement) for statement in node.body):
                self._report(node, "polls until something happens")
            case ast.Await():
                self._await(node.value, scope)
            case ast.Call():
                self._call(node, scope)
                if _dotted(node.func) in ("asyncio.wait_for", "asyncio.wait") and not _untimed(node, 1):
                    scope = _Scope(bounded=True, in_async=scope.in_async)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _visit_with(self, node: ast.AsyncWith, scope: _Scope) -> None:
        for item in node.items:  # `async with asyncio.timeout(3), condition:` bounds the second, too
            self._visit(item.context_expr, scope)
            if _is_timeout(item.context_expr):
                scope = _Scope(bounded=True, in_async=scope.in_async)
        for child in node.body:
            self._visit(child, scope)

    # -------------------------------------------------------------- what waits

    def _await(self, value: ast.expr, scope: _Scope) -> None:
        if scope.bounded:
            return
        if isinstance(value, (ast.Name, ast.Attribute)):
            self._report(value, f"await {ast.unparse(value)}")
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return
        owner, method = ast.unparse(value.func.value), value.func.attr
        if (
            method in ("create_future", "put")
            or (owner.endswith("reader") and method.startswith("read"))
            or (owner.endswith("writer") and method == "drain")
            or owner.endswith(_OTHER_PROCESSES)
        ):
            self._report(value, f"await {owner}.{method}()")

    def _call(self, call: ast.Call, scope: _Scope) -> None:
        if scope.bounded and scope.in_async:
            return
        name = _dotted(call.func)
        if name in _FUNCTIONS:
            if _untimed(call, _FUNCTIONS[name]):
                self._report(call, f"{name} without a time-out")
        elif name in _FUNCTIONS_WITH_FLAG:
            if not any(flag in ast.unparse(call) for flag in _FUNCTIONS_WITH_FLAG[name]):
                self._report(call, f"{name} without {_FUNCTIONS_WITH_FLAG[name][0]}")
        elif isinstance(call.func, ast.Attribute) and self._method_waits(call, call.func, scope):
            self._report(call, f"{ast.unparse(call.func)}()")

    def _method_waits(self, call: ast.Call, func: ast.Attribute, scope: _Scope) -> bool:
        method, owner = func.attr, _last_name(func.value)
        bare = not call.args and not call.keywords
        if method == "join" and call.args:
            return _is_none(call.args[0])  # else a thread's time, or strings
        if method == "acquire" and _not_blocking(call):
            return False
        if method == "wait" and owner in self._timed_barriers:
            return False
        if method in _WAITS:
            return _untimed(call, _WAITS[method])
        if method == "result" and scope.in_async:
            return False  # asyncio's, which never blocks
        if method == "get" and owner in self._context_variables:
            return False
        if method == "recv" and call.args:
            return True  # a socket's
        if method == "put" and not scope.in_async:
            return owner not in self._simple_queues and len(call.args) == 1 and _untimed(call, 2)
        if method == "shutdown" and owner in self._executors:
            return not any(k.arg == "wait" and _is_false(k.value) for k in call.keywords)
        return method in _WAITS_WITHOUT_ARGUMENTS and bare

    def _report(self, node: ast.expr | ast.stmt, what: str) -> None:
        self._found.append(Finding(node.lineno, what))


def _made_by(tree: ast.Module) -> Callable[[Callable[[ast.Call], bool]], set[str]]:
    """A question: names of variables and attributes that are assigned a call of some kind anywhere in the module."""
    assigned: list[tuple[str, ast.Call]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned += [(_last_name(target), node.value) for target in targets]
    return lambda wanted: {name for name, call in assigned if wanted(call)}


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ".".join(reversed(parts))


def _last_name(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def _is_executor(call: ast.Call) -> bool:
    return _dotted(call.func).endswith("PoolExecutor")


def _is_timeout(node: ast.expr) -> bool:
    """`asyncio.timeout(seconds)`, `asyncio.timeout_at(moment)`, but not `asyncio.timeout(None)`."""
    return (
        isinstance(node, ast.Call)
        and _dotted(node.func) in ("asyncio.timeout", "asyncio.timeout_at")
        and bool(node.args)
        and not _is_none(node.args[0])
    )


def _untimed(call: ast.Call, position: int | None) -> bool:
    """True if the call is given no time-out, or None for one."""
    for keyword in call.keywords:
        if keyword.arg == "timeout":
            return _is_none(keyword.value)
    if position is not None and len(call.args) > position:
        return _is_none(call.args[position])
    return True


def _not_blocking(call: ast.Call) -> bool:
    first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "blocking"), None)
    return first is not None and _is_false(first)


def _only_sleeps(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
    return isinstance(value, ast.Call) and _SLEEPS.match(_dotted(value.func)) is not None


def _is_none(node: ast.expr) -> bool:
    """None, or an expression that may be None by the look of it."""
    if isinstance(node, ast.IfExp):
        return _is_none(node.body) or _is_none(node.orelse)
    return isinstance(node, ast.Constant) and node.value is None


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
