"""Start and rendezvous of processes."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.script.forms import INIT, SPAWN
from elasticflow.lint.script.ranks import is_entry_check, words_of
from elasticflow.python_source.syntax import argument, called_name, dotted_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.python_source.script import Script

_PORT = re.compile(r"tcp://[^/]*:([0-9]+)/?")
_ASKS = re.compile(
    r"environ|getenv|port|slurm|torchrun|elastic|launch|RANK|WORLD_SIZE|MASTER|distributed|world",
    re.IGNORECASE,
)
_REMEDY = "let torchrun choose it (`torchrun --standalone`), and call init_process_group without init_method"


def fixed_ports(view: View) -> Iterator[Finding]:
    """Yield each place that fixes the rendezvous port, regardless of the environment."""
    script = view.script
    for node in script.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                port = _port(script, node.value) if _is_variable(target, {"MASTER_PORT"}) else None
                if port and not _is_asked(script, node):
                    yield _of_port(node.value, port)
        elif isinstance(node, ast.Call):
            yield from _in_call(script, node)


def _in_call(script: Script, call: ast.Call) -> Iterator[Finding]:
    origin = script.origin(call.func)
    if origin == INIT:
        method = argument(call, "init_method", 1)
        address = method.value if isinstance(method, ast.Constant) else None
        match = _PORT.fullmatch(address) if isinstance(address, str) else None
        if match and method is not None and match[1] != "0" and not _is_asked(script, call):
            yield _of_port(method, match[1])
    elif origin == "os.environ.update" and call.args and isinstance(call.args[0], ast.Dict):
        for key, value in zip(call.args[0].keys, call.args[0].values, strict=True):
            port = (
                _port(script, value) if isinstance(key, ast.Constant) and key.value == "MASTER_PORT" else None
            )
            if port and not _is_asked(script, call):
                yield _of_port(value, port)


def _of_port(node: ast.expr, port: str) -> Finding:
    return Finding(
        codes.LINT_FIXED_PORT,
        node,
        f"the ranks meet at port {port} whatever else runs: a second run on this machine, or a restart while the port is taken, fails",
        _REMEDY,
    )


def _port(script: Script, value: ast.expr) -> str | None:
    """Return the certain port of an expression; None if it may vary, or is 0, which means any free port."""
    if isinstance(value, ast.Call) and script.origin(value.func) == "builtins.str" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, ast.Name):
        values = script.names.assigned(value.id)
        if len(values) != 1 or not isinstance(values[0], ast.Constant):
            return None
        value = values[0]
    text = str(value.value) if isinstance(value, ast.Constant) else ""
    return text if text.isdigit() and text != "0" else None


def _is_asked(script: Script, node: ast.AST) -> bool:
    """Return whether a condition around a place tests how the script was started."""
    for whole, part in script.above(node):
        if isinstance(whole, ast.ExceptHandler):
            return True
        if not isinstance(whole, ast.If | ast.IfExp) or part is whole.test or is_entry_check(whole.test):
            continue
        if any(map(_ASKS.search, words_of(whole.test))):
            return True
    return False


def _is_variable(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression is an environment variable: `os.environ["NAME"]`."""
    return (
        isinstance(node, ast.Subscript)
        and dotted_name(node.value).endswith("environ")
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in names
    )


def reads_of_environment(script: Script, names: set[str]) -> bool:
    """Return whether a script reads one of these environment variables, and never sets it."""
    is_read = False
    for node in script.nodes:
        if isinstance(node, ast.Subscript) and _is_variable(node, names):
            if isinstance(node.ctx, ast.Store):
                return False
            is_read = True
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            origin = script.origin(node.func)
            if node.args[0].value in names and origin in {"os.getenv", "os.environ.get"}:
                is_read = True
    return is_read


def spawns_under_torchrun(view: View) -> Iterator[Finding]:
    """Yield each `mp.spawn` that torchrun's workers would call as well."""
    script = view.script
    if not reads_of_environment(script, {"LOCAL_RANK"}):
        return
    for call in script.calls_of(*SPAWN):
        if not _is_conditional(script, call):
            yield Finding(
                codes.LINT_SPAWN,
                call.func,
                "mp.spawn starts processes in each worker: the script reads LOCAL_RANK, as one that torchrun starts, once per GPU",
                "call the function itself and start the script with torchrun, or read no LOCAL_RANK and start it with python",
                "error",
            )


def _is_conditional(script: Script, node: ast.AST) -> bool:
    """Return whether a condition other than `__name__ == "__main__"` guards a place, in its function or a caller."""
    above = list(script.above(node))
    if any(isinstance(whole, ast.If) and not is_entry_check(whole.test) for whole, _ in above):
        return True
    function = script.function_of(node)
    if function is None:
        return False
    if any(
        isinstance(inner, ast.Return) and inner.lineno < getattr(node, "lineno", 0)
        for inner in ast.walk(function)
    ):
        return True
    callers = script.callers.get(function, [])
    return not callers or any(
        _is_conditional(script, call) for call in callers if script.function_of(call) is not function
    )


def local_rank_by_argument(view: View) -> Iterator[Finding]:
    """Yield the option `--local_rank` of a script that takes its GPU from the option, and never reads LOCAL_RANK."""
    script = view.script
    if "LOCAL_RANK" in script.text or script.names.modules & {"deepspeed", "accelerate", "transformers"}:
        return
    if script.names.assigned_attribute("local_rank") or _is_set_elsewhere(script):
        return
    is_read = any(
        isinstance(node, ast.Attribute) and node.attr == "local_rank" and isinstance(node.ctx, ast.Load)
        for node in script.nodes
    )
    for call in script.calls:
        flags = {each.value for each in call.args if isinstance(each, ast.Constant)}
        if is_read and called_name(call) == "add_argument" and flags & {"--local_rank", "--local-rank"}:
            yield Finding(
                codes.LINT_LOCAL_RANK,
                call,
                "torchrun passes no --local_rank: every worker has its default, and takes the same GPU or trains alone",
                'take it from torchrun: default=int(os.environ.get("LOCAL_RANK", 0))',
            )
            return


def _is_set_elsewhere(script: Script) -> bool:
    """Return whether a function of another file gets all arguments, and may set the rank in them."""
    return any(
        script.called(call) is None
        and re.search(r"dist|setup|init|prepare|env", called_name(call), re.IGNORECASE)
        and any(
            isinstance(each, ast.Name) and each.id in {"args", "opt", "opts", "options", "cfg", "config"}
            for each in call.args
        )
        for call in script.calls
    )
