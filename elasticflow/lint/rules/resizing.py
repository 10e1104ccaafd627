"""Checks that end a script if the number of workers has changed."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.lint.rules.finding import Finding
from elasticflow.lint.script.ranks import words_of
from elasticflow.lint.script.values import words_behind
from elasticflow.python_source.syntax import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.lint.rules.finding import View
    from elasticflow.python_source.script import Script

_WORLD = re.compile(
    r"_?((ddp|dist|dp|data_parallel|global)_)?world_?size_?|num_(processes|replicas|workers_total)|get_world_size",
    re.IGNORECASE,
)
# Groups inside a model, whose size no resize changes.
_INNER = re.compile(r"(^|_)(tp|tensor|pp|pipeline|mp|model_parallel|cp|ep|sp|expert|intra|inner|group|shard)(_|$)", re.IGNORECASE)  # fmt: skip
_OF_NODE = re.compile(r"local|node|device_count|nproc|machine|group|parallel|pipeline|(^|_)tp(_|$)", re.IGNORECASE)  # fmt: skip


def world_sizes_asserted(view: View) -> Iterator[Finding]:
    """Yield each assertion, or condition with `raise`, that holds only for some numbers of workers."""
    script = view.script
    for node in script.nodes:
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        ):
            test = node.test
        else:
            continue
        if any(_is_of_some_sizes(script, part) for part in ast.walk(test)):
            yield Finding(
                codes.LINT_RESIZE_BREAKS,
                test,
                f"`{ast.unparse(test)}` holds for some numbers of workers only: after a resize to another one every worker ends here",
                "keep their number, by nodes.min = nodes.max and a fixed nodes.nproc_per_node, or share out what does not divide",
            )


def _is_of_some_sizes(script: Script, part: ast.AST) -> bool:
    match part:
        case ast.BinOp(op=ast.Mod(), left=left, right=right):
            whole = script.parents[part]
            if isinstance(whole, ast.Compare) and not isinstance(whole.comparators[-1], ast.Constant):
                return False
            # A resize adds or removes whole nodes: a multiple of a node's workers stays one.
            is_by_node = any(_OF_NODE.search(word) for word in words_of(right))
            is_padded = any("pad" in word.lower() for word in words_of(left))
            return (_is_size(script, right) and not is_padded) or (_is_size(script, left, hops=0) and not is_by_node)  # fmt: skip
        case ast.Compare(
            left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=int(number))]
        ):
            return number > 1 and "num_processes" not in words_of(left) and _is_size(script, left, hops=0)
        case ast.Compare(
            left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.List() | ast.Tuple() | ast.Set()]
        ):
            return _is_size(script, left, hops=0)
        case _:
            return False


def _is_size(script: Script, node: ast.expr, hops: int = 1) -> bool:
    """Return whether an expression is computed from the total number of workers."""
    if hops == 0 and isinstance(node, ast.Call) and called_name(node) != "get_world_size":
        return False
    own = words_of(node)
    if any(_INNER.search(word) for word in own) or any("rank" in word.lower() for word in own):
        return False
    is_named = isinstance(node, ast.Name) and hops > 0
    words = own | (words_behind(script, node, hops) if is_named else set())
    return any(_WORLD.fullmatch(word) for word in words)
