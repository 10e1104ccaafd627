"""What a definition takes, read from its source."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.constructors import constructor_of
from elasticflow.jobfile.python_source.import_origins import refuse_decorators
from elasticflow.jobfile.python_source.parameters import Signature, from_arguments

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.definitions import Definition
    from elasticflow.jobfile.python_source.resolve import Resolver


def signature_of(definition: Definition, resolver: Resolver) -> Signature:
    """Return the signature of a function or of a class's constructor, less what is bound already.

    Raises:
        CannotTellError: a decorator, metaclass or base hides it.
    """
    node = definition.node
    if isinstance(node, ast.ClassDef):
        found = constructor_of(definition, resolver)
    else:
        if not isinstance(node, ast.Lambda):
            refuse_decorators(definition.module, node)
        found = from_arguments(node.args, definition.module)
    if definition.num_bound or definition.preset:
        found = found.after(definition.num_bound, definition.preset)
    return found
