"""What `elasticflow guide` says of scripts: each bad example gives its code, each good one gives nothing."""

from __future__ import annotations

import pytest

from elasticflow.jobfile.diagnostics.codes import explanation_of, titles
from elasticflow.lint.check import lint_source

CODES = [code for code in titles() if code.startswith("EF6")]


@pytest.mark.parametrize("code", CODES)
def test_examples_are_what_they_say(code: str) -> None:
    """The bad one gives its own code, the good one not, and no other error."""
    each = explanation_of(code)
    assert each is not None
    assert code in {finding.code for finding in lint_source(each.bad.encode(), "train.py")}
    after = lint_source(each.good.encode(), "train.py")
    assert code not in {finding.code for finding in after}
    assert [] == [finding for finding in after if finding.severity == "error"]
