"""The table of hooks: functions of the job that are called at moments of its training."""

from __future__ import annotations

from pydantic import Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import Args, Entry, StepsText, Table, bad_key, optional


class HookTable(Table):
    """A hook with arguments or an interval."""

    entry: Entry = Field(
        description="Called with a context: step, epoch, model, metrics, log_text, log_image, log_scalar ...",
        examples=["mine:sample"],
    )
    args: Args = Field(
        default={},
        description="Keyword arguments of the callable, besides the context.",
        examples=[{"length": 200}],
    )
    every: StepsText | None = optional(
        description="For on_step: an interval; default: each step.", examples=["100 steps"]
    )
    all_ranks: bool = Field(default=False, description="Every worker calls it; default: rank 0 alone.")


class HooksTable(Table):
    """Functions of yours that are called while the job trains; they look, log and change nothing."""

    on_start: Entry | HookTable | None = optional(
        description="Called when training begins, and each time it resumes after a restart.",
        examples=["mine:begin"],
    )
    on_step: Entry | HookTable | None = optional(
        description='Called after each step, or at an interval: { entry = ..., every = "100 steps" }.',
        examples=[{"entry": "mine:histograms", "every": "100 steps"}],
    )
    on_evaluation: Entry | HookTable | None = optional(
        description='Called after each evaluation; its metrics are in context.metrics["eval"].',
        examples=["mine:sample", {"entry": "mine:sample", "args": {"length": 200}}],
    )
    on_snapshot: Entry | HookTable | None = optional(
        description="Called when a snapshot is due, right before it is taken; its name is context.snapshot.",
        examples=["mine:announce"],
    )
    on_finish: Entry | HookTable | None = optional(
        description="Called once training has ended and its last snapshot is committed.",
        examples=["mine:end"],
    )

    def named(self) -> dict[str, HookTable]:
        """Return the job's hooks by name, each as a table."""
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: hook if isinstance(hook, HookTable) else HookTable(entry=hook)
            for name, hook in given.items()
            if hook is not None
        }

    @model_validator(mode="after")
    def _every_is_of_steps(self) -> HooksTable:
        for name, hook in self.named().items():
            if hook.every is not None and name != "on_step":
                message = (
                    f"hooks.{name} has `every`, which is on_step's: the others are called whenever it happens"
                )
                raise bad_key(name, codes.UNKNOWN_KEY, message, "leave it out, or take on_step")
        return self
