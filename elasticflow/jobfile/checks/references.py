"""References in the job's texts: `${env:NAME}`, `${job.name}`, and `${dataset.NAME}` for a value of the data.

References are looked up once, after files, case and flags have been merged and before any table is validated. A key
that may hold references is marked so in its model. Every other key refuses them: the file itself says what is trained;
only the place of the training may come from outside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.tables.evaluation import without_set
from elasticflow.jobfile.tables.job import Job, model_of
from elasticflow.jobfile.tables.notify import looked_up
from elasticflow.jobfile.tables.types import MayRefer, SecretVariable, TextWithSecrets
from elasticflow.jobfile.text.layers import content_of, table_at, value_at
from elasticflow.jobfile.type_checks.annotations import DatasetValue
from elasticflow.jobfile.wording.type_descriptions import annotation_at
from elasticflow.system.redaction import is_secret, is_secret_variable, without_password

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.source import Source

_MARK = re.compile(r"\$\$\{|\$\{(?P<inside>[^{}]*)\}|\$\{")
_VARIABLE = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)
_OF_DATA = re.compile(r"dataset\.(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_ARGS_FROM_DATA = ("model", "optimizer", "lr_scheduler", "evaluation")
_ENDS_PASSWORD = frozenset("/@:?#&")  # such a character would leave the rest of a password in records
_LEAST_OF_VARIABLE = 2  # env.NAME, or env.NAME.value
_LEAST = 4  # a shorter value is part of too many words
_FACTS = ("job.name", "job.seed", "matrix.case")
_FORMS = "${env:NAME}, ${env:NAME:-default}, ${job.name}, ${job.seed} and, in a case, ${matrix.case}"
_HOW_FROM_DATA = (
    "an attribute of the training data may be the whole text of an argument of the model, the optimizer, the schedule, "
    'collate or the evaluation: vocab_size = "${dataset.vocab_size}"'
)


@dataclass
class References:
    """Looks up the references of one job.

    Attributes:
        case: Name of the job's case, if the job is one of a matrix.
        environment: Variables by name. None: variables are not looked up, so that a file is validated alike on every
            machine; a hook or CI does not have them, and a variable that is not set there is no mistake of the file.
        hidden: Secrets that were looked up: no message may show them.
        secrets: The texts that hold secrets, by key.
    """

    source: Source
    case: str | None
    environment: Mapping[str, str] | None
    problems: list[Diagnostic] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    secrets: dict[KeyPath, TextWithSecrets] = field(default_factory=dict)

    def resolved(self) -> Source:
        """Return the source with every reference replaced."""
        raw = {
            name: self._value(table, (name,)) if "${" in str(content_of(table)) else table
            for name, table in self.source.raw.items()
        }
        return replace(self.source, raw=raw, written=self.source.raw)

    def mask(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return a diagnostic without the secrets that were looked up."""
        if not self.hidden:
            return diagnostic
        return diagnostic._replace(
            message=self._masked(diagnostic.message), help=diagnostic.help and self._masked(diagnostic.help)
        )

    def _masked(self, text: str) -> str:
        for value in sorted(self.hidden, key=len, reverse=True):
            for form in (value, show(value)[1:-1]):
                text = text.replace(form, "***")
            # A long text is shown cut off, perhaps in the middle of the secret.
            cut = next((n for n in range(len(value) - 1, 0, -1) if f'{value[:n]}..."' in text), 0)
            text = text.replace(f'{value[:cut]}..."', '***..."') if cut else text
        return text

    def _value(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, str):
            return self._text(value, path) if "${" in value else value
        if not isinstance(value, dict | list):
            return value
        if isinstance(value, dict):
            return {key: self._value(each, (*path, key)) for key, each in value.items()}
        return [self._value(each, (*path, number)) for number, each in enumerate(value)]

    def _text(self, text: str, path: KeyPath) -> str | DatasetValue:
        if "${dataset." in text and (value := self._of_data(text, path)) is not None:
            return value
        mark = _marker(path)
        if mark is None and any(reference[0] != "$${" for reference in _MARK.finditer(text)):
            self._refuse_here(path)
            return text
        if mark is not None and mark.is_late:
            return self._late(text, path)
        is_open, last = False, 0
        spelled: list[str | SecretVariable] = []
        secrets: dict[SecretVariable, str] = {}
        for reference in _MARK.finditer(text):
            spelled.append(text[last : reference.start()])
            last = reference.end()
            piece = "${" if reference[0] == "$${" else self._look_up(reference, path, secrets)
            is_open |= piece is None
            spelled.append(reference[0] if piece is None else piece)
        spelled.append(text[last:])
        result = "".join(secrets[each] if isinstance(each, SecretVariable) else each for each in spelled)
        self.hidden |= {value for value in secrets.values() if len(value) >= _LEAST}
        if secrets and path[0] != "env":
            self.secrets[path] = tuple(each for each in spelled if each)
        if path == ("snapshots", "uri") and any(set(value) & _ENDS_PASSWORD for value in secrets.values()):
            message = "snapshots.uri: a looked-up secret holds characters that end a password in a URL"
            remedy = "percent-encode it in the variable: / is %2F, @ is %40, : is %3A"
            self._say(codes.SECRET_RECORDED, message, path, remedy)
        return mark.instead if is_open and mark is not None and mark.instead else result

    def _late(self, text: str, path: KeyPath) -> str:
        """Check the references of a text whose secrets are looked up on use; return the text with all others replaced."""
        secrets: dict[SecretVariable, str] = {}
        references = [reference for reference in _MARK.finditer(text) if reference[0] != "$${"]
        pieces = [self._look_up(reference, path, secrets) for reference in references]
        self.hidden |= {value for value in secrets.values() if len(value) >= _LEAST}
        facts = self._facts()
        kept = _MARK.sub(lambda reference: facts.get(reference["inside"] or "", reference[0]), text)
        if self.environment is not None and None not in pieces:
            try:
                looked_up(kept, self.environment)
            except ValueError as error:
                self._say(
                    codes.MALFORMED, f"{dotted(path)}: {error}", path, "set it to the URL of the webhook"
                )
        return kept

    def _of_data(self, text: str, path: KeyPath) -> str | DatasetValue | None:
        """Return the value of the data that *text* stands for; *text* itself if the key refuses one; None for other texts."""
        inside = [each["inside"] or "" for each in _MARK.finditer(text)]
        name = next((match["name"] for each in inside if (match := _OF_DATA.fullmatch(each))), None)
        if name is None:
            return None
        where, why = dotted(path), ""
        if path[:2] in {("dataset", "args"), ("dataset", "mix")}:
            why = f"{where} is what the data is opened with: it cannot come from the data"
        elif not _may_come_from_data(path):
            why = f"{where} takes no values of the data"
        elif text != f"${{dataset.{name}}}":
            why = f"{where} can be a value of the data as a whole only, not a part of a text"
        elif "shards" in table_at(self.source.raw, "dataset"):
            why = (
                f"{where} needs the training data opened, and with dataset.shards it is opened shard by shard"
            )
        if not why:
            return DatasetValue(name)
        self._say(codes.NO_REFERENCE_HERE, why, path, f"{_HOW_FROM_DATA};\n$${{ stands for ${{ itself")
        return text

    def _look_up(
        self, reference: re.Match[str], path: KeyPath, secrets: dict[SecretVariable, str]
    ) -> str | SecretVariable | None:
        """Return the text that a reference stands for, or the variable if the text is secret; None if it is not known here."""
        inside = reference["inside"]
        if inside is None:
            self._say(
                codes.NO_REFERENCE,
                f"{dotted(path)}: a reference that begins here does not end",
                path,
                "close it with }; $${ stands for ${ itself",
            )
            return None
        fact = self._facts().get(inside)
        if fact is not None:
            return fact
        variable = _VARIABLE.fullmatch(inside)
        if variable is None:
            self._unknown(inside, path)
            return None
        name, default = variable["name"], variable["default"]
        is_told_secret = is_secret(name) or any(is_secret(str(part)) for part in path[2:])
        is_told_secret |= _is_late(path) or (path[0] == "env" and self._stays_out(reference[0], path))
        if is_told_secret and not self._stays_out(reference[0], path):
            self._recorded(reference[0], path)
            return None
        value = default if self.environment is None else self.environment.get(name)
        if default is not None:
            value = value or default  # as in a shell: also for a variable that is set to an empty text
        if value is None:
            self._not_set(name, path)
        elif is_told_secret and self.environment is not None:
            secrets[SecretVariable(name, default)] = value
            return SecretVariable(name, default)
        return value

    def _facts(self) -> dict[str, str]:
        job = table_at(self.source.raw, "job")
        facts = {"job.name": job.get("name"), "job.seed": str(job.get("seed", 0)), "matrix.case": self.case}
        return {key: value for key, value in facts.items() if isinstance(value, str)}

    def _stays_out(self, reference: str, path: KeyPath) -> bool:
        """Return whether records leave out the value at this place (`redaction.without_password`)."""
        if _is_late(path):
            return True
        if path == ("snapshots", "uri"):
            written = str(value_at(path, self.source.raw)).replace(reference, "REFERENCE")
            return "REFERENCE" not in without_password(written)
        if path[0] == "env":
            return is_secret_variable(str(path[1]), value_at(path[:2], self.source.raw))
        return path[:2] == ("snapshots", "options") and any(is_secret(str(part)) for part in path[2:])

    def _refuse_here(self, path: KeyPath) -> None:
        if annotation_at(without_set(path)[:2]) is None:
            return  # an unknown table or key is refused as a whole
        message = f"{dotted(path)} takes no references"
        remedy = f"write the value itself ($${{ stands for ${{);\nreferences may stand in {', '.join(_keys_with_references())}"
        if path[:2] == ("kubernetes", "secrets"):
            remedy = f'name a Secret of the cluster and a key of it: {path[-1]} = "secret/key"'
        self._say(codes.NO_REFERENCE_HERE, message, path, remedy)

    def _unknown(self, inside: str, path: KeyPath) -> None:
        if inside == "matrix.case":
            message, remedy = "${matrix.case} is known in the cases of a [matrix] only", "use ${job.name}"
        else:
            message = f"{dotted(path)}: there is no {show('${' + inside + '}')[1:-1]}"
            near = [f"env:{name}" for name in re.findall(r"(?i)\benv[.:]([a-z_][a-z0-9_]*)$", inside)]
            near += nearest(inside, _FACTS)
            near += [f"env:{inside}"] if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", inside) else []
            remedy = f"there are {_FORMS};\n$${{ stands for ${{ itself"
            remedy = f"did you mean ${{{near[0]}}}?\n{remedy}" if near else remedy
        self._say(codes.NO_REFERENCE, message, path, remedy)

    def _recorded(self, reference: str, path: KeyPath) -> None:
        message = f"{dotted(path)} is written into the run's records, and {reference} looks like a secret"
        remedy = "read the variable in your own code: workers have the environment of the command"
        if path[0] == "env":
            remedy = f"say that it is one: {path[1]} = {{ value = {show(reference)}, secret = true }}"
        if path[0] == "snapshots":
            remedy = "secrets may stand as the password of snapshots.uri, and in snapshots.options at keys named like one"
        self._say(codes.SECRET_RECORDED, message, path, remedy)

    def _not_set(self, name: str, path: KeyPath) -> None:
        if self.environment is None:
            message = f"{dotted(path)} is known where the job runs: ${{env:{name}}} is not looked up here"
            note = self.source.problem(codes.NOT_SET, message, path, severity="note")
            self.problems.append(note)
        else:
            message = f"the variable {name} is not set, and {dotted(path)} needs it"
            self._say(codes.NOT_SET, message, path, f"set it, or give a default: ${{env:{name}:-default}}")

    def _say(self, code: str, message: str, path: KeyPath, remedy: str) -> None:
        self.problems.append(self.source.problem(code, message, path, remedy=remedy))


def _may_come_from_data(path: KeyPath) -> bool:
    """Return whether *path* is, or lies in, the arguments of an object that is made after the data is opened."""
    path = without_set(path)
    in_group = path[:2] == ("optimizer", "groups") and path[3:4] == ("args",)
    of_metric = path[:2] == ("evaluation", "metrics") and path[3:4] == ("args",)
    of_collate = path[:3] in {("dataset", "collate", "args"), ("evaluation", "collate", "args")}
    return in_group or of_metric or of_collate or (path[0] in _ARGS_FROM_DATA and path[1:2] == ("args",))


def _marker(path: KeyPath) -> MayRefer | None:
    """Return the mark of the key that *path* is, or lies in; None if the key takes no references."""
    if len(path) < 2 or path[0] not in Job.model_fields:
        return None
    if path[:2] == ("dataset", "mix") and path[3:4] not in {(), ("args",)}:
        return None  # a set of the mixture takes references in its arguments only
    if path[0] == "env":
        return MayRefer() if len(path) == _LEAST_OF_VARIABLE or path[2:] == ("value",) else None
    key = model_of(str(path[0])).model_fields.get(str(without_set(path)[1]))
    return next((mark for mark in key.metadata if isinstance(mark, MayRefer)), None) if key else None


def _is_late(path: KeyPath) -> bool:
    """Return whether references to the environment stay in the job until they are used."""
    mark = _marker(path)
    return mark is not None and mark.is_late


def _keys_with_references() -> list[str]:
    return [
        f"{table}.{key}"
        for table in Job.model_fields
        for key in model_of(table).model_fields
        if _marker((table, key))
    ] + ["env"]
