"""Suggestions for a key that its table does not have: a misspelt key, a key of another table, a name of another tool."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.diagnostics.suggestions import is_table, nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, to_toml
from elasticflow.jobfile.tables.evaluation import without_set
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.slurm import why_refused
from elasticflow.jobfile.text.layers import flag_layer, value_at
from elasticflow.jobfile.text.read import UnreadableError
from elasticflow.jobfile.wording.foreign_names import (
    DECIDED_ELSEWHERE,
    LOCAL,
    Meaning,
    meaning_in,
    meaning_of,
    plain,
)
from elasticflow.jobfile.wording.same_values import accepts, same_value
from elasticflow.jobfile.wording.type_descriptions import annotation_at, describe, keys_at
from elasticflow.system import redaction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.source import Source

# Tables whose keys have the words of other programs: a port or a timeout elsewhere means something else.
_OF_OTHER_PROGRAMS = {"kubernetes", "notify", "ray", "script", "slurm"}
_SURE = 0.8  # least likeness of a slip to the intended key, where another meaning is possible
_LONGEST = 80


class KeySuggestion(NamedTuple):
    """A suggestion for a key that its table does not have.

    Attributes:
        keys: Whole paths of the keys that may be meant: one if the key is certain, none if there is no such key.
        value: The value to write there, as TOML; empty if unknown.
        note: Further advice; without a key, the only advice.
        is_slip: The key is in the right table, and its name is misspelt.
    """

    keys: tuple[KeyPath, ...]
    value: str = ""
    note: str = ""
    is_slip: bool = False

    def in_file(self, path: KeyPath, source: Source) -> str:
        """Return the help for the key at *path* of a job's file."""
        if len(self.keys) != 1:
            return self._several(str(path[-1])) if self.keys else self.note
        key, around = self.keys[0], path[:-1]
        is_given = path != key and _is_beside(source, path, key)
        if self.is_slip:
            return f'did you mean "{key[-1]}"?{" It is given already: keep one of them" if is_given else ""}'
        if len(key) == 1:
            return self._table(path, source)
        if is_given:
            is_same = self.value and self.value == to_toml(value_at(key, source.raw))
            what = "take this out" if is_same else "keep one of them"
            return f"this is {dotted(key)} here, which is given already: {what}"
        if around[: len(key) - 1] == key[:-1] and len(around) >= len(key) and key[-1] == path[-1]:
            where = f"above [{dotted(around)}]" if has_header(source, around) else f"out of {dotted(around)}"
            return f"it belongs in [{dotted(key[:-1])}]: move it up, {where}"
        return f"{self._line(key, around, source)}{self._noted()}"

    def in_flag(self, value: object) -> str:
        """Return the `--set` to write instead of one that sets the key to this value."""
        if len(self.keys) != 1:
            return self._several("") if self.keys else self.note
        key, text = self.keys[0], self.value
        if key == ("extends",):
            return "write it in the job file: a flag cannot extend it"
        # A flag sets one key, which may lie in a table.
        while not text and isinstance(value, dict) and len(value) == 1:
            [(inner, value)] = value.items()
            key, text = (*key, inner), "" if isinstance(value, dict) else to_toml(value)
        return f"{set_flag(key, text)}{self._noted()}"

    def in_axis(self) -> str:
        """Return the help for an axis, or for a key of a case."""
        if len(self.keys) != 1:
            return self._several("") if self.keys else self.note
        return f"did you mean {dotted(self.keys[0])}?{self._noted()}"

    def _noted(self) -> str:
        return f" ({self.note})" if self.note else ""

    def _several(self, name: str) -> str:
        if not name:
            return f"did you mean {' or '.join(map(dotted, self.keys))}?"
        return f'"{name}" belongs in {" or ".join(f"[{dotted(key[:-1])}]" for key in self.keys)}'

    def _table(self, path: KeyPath, source: Source) -> str:
        name, value = str(self.keys[0][0]), value_at(path, source.raw)
        if name == "extends":
            file = value if isinstance(value, str) and value.endswith(".toml") else "FILE.toml"
            return f"write extends = {to_toml(file)} at the top of the file, above all tables"
        if not isinstance(value, dict):
            return f"this is a table here: [{name}] takes {', '.join(keys_at((name,))) or 'NAME = ... for each name'}"
        if len(path) > 1:
            return f"it is a table of its own: write [{name}], not [{dotted(path)}]"
        is_given = name != path[0] and value_at((name,), source.raw) is not None
        return f"did you mean [{name}]?{' It is given already: move these keys there' if is_given else ''}"

    def _line(self, key: KeyPath, around: KeyPath, source: Source) -> str:
        """Return the line to write, in the innermost table that the file has."""
        if not self.value:
            kind = describe(annotation_at(key))
            return f"this is {dotted(key)} here{'' if kind == 'something else' else f': {kind}'}"
        table = key[:-1]
        while len(table) > 1 and not isinstance(value_at(table, source.raw), dict):
            table = table[:-1]
        place, here = source.look(table), source.look(around)
        if table != around and place and place[1].value is not None and here and here[0] is place[0]:
            return f"write {dotted(key[len(table) :])} = {self.value} inside the braces of {dotted(table)}"
        line = f"write {dotted(key[len(table) :])} = {self.value}"
        return line if table == around else f"{line} in [{dotted(table)}]"


def set_flag(key: KeyPath, value: str) -> str:
    """Return the `--set` that gives a key a value, quoted for a shell; *value* is TOML, or empty if unknown."""
    if not value or len(value) > _LONGEST:
        return f"write --set {dotted(key)}=..."
    if value.startswith('"') and value.count('"') == 2 and not _is_toml(value[1:-1]):
        value = value[1:-1]
    return f"write --set {shlex.quote(f'{dotted(key)}={value}')}"


def _is_toml(text: str) -> bool:
    """Return whether a text without its quotes would be another value: "3", "true"."""
    import tomli

    try:
        tomli.loads(f"v = {text}")
    except tomli.TOMLDecodeError:
        return False
    return True


def flag_for(option: str, text: str) -> str | None:
    """Return the `--set` to write instead of an unknown option; None if no key is like it.

    Args:
        option: The option as given: `--max-epochs`.
        text: The option's value; empty if it has none.
    """
    name = plain(option.replace(".", "__dot__")).replace("__dot__", ".")
    try:
        layer = flag_layer(f"{name}={text or 'true'}")
    except UnreadableError:
        return None
    path = tuple(name.split("."))
    if len(path) > 1 and path[-1] in keys_at(path[:-1]):
        return f"keys of the job file are set by --set {name}={text or '...'}"
    suggestion = suggest_key((name,), value_at((name,), layer.raw))
    if len(suggestion.keys) > 1:
        return f"keys of the job file are set by --set: {' or '.join(f'{dotted(key)}=...' for key in suggestion.keys)}"
    if len(suggestion.keys) == 1 and len(suggestion.keys[0]) > 1:
        return suggestion.in_flag(None)
    return suggestion.note if meaning_of(name) is not None else None


def suggest_key(path: KeyPath, value: object) -> KeySuggestion:
    """Return the suggestion for the unknown key at *path*, which has this value."""
    suggestion = _suggestion(path, value)
    if without_set(path) == path:
        return suggestion
    of_set = tuple(
        (*path[:2], *key[1:]) if key[:1] == path[:1] and len(key) == 2 else key for key in suggestion.keys
    )
    return suggestion._replace(keys=of_set)  # a key of [evaluation] belongs in the set's own table


def _suggestion(path: KeyPath, value: object) -> KeySuggestion:
    around, name = path[:-1], str(path[-1])
    names = keys_at(around) if around else [*Job.model_fields, "extends"]
    if around == ("torchrun",) and plain(name) in DECIDED_ELSEWHERE:
        return KeySuggestion((), note=DECIDED_ELSEWHERE[plain(name)])
    same = [each for each in names if plain(each) == plain(name)]
    # torchrun's max_restarts and nnodes are no slips of the tables [restarts] and [nodes].
    is_no_table = not around and not is_table(value)
    if not same and is_no_table and (foreign := _foreign(path, value, names)) is not None:
        return foreign
    if same or (near := nearest(name, names, _SURE)):
        return KeySuggestion(((*around, (same or near)[0]),), _value(path, name, value), is_slip=True)
    if around[:1] == ("matrix",):
        return _in_matrix(path, value)
    if (foreign := _foreign(path, value, names)) is not None:
        return foreign
    homes = _homes(name, around, value)
    if homes:
        return KeySuggestion(homes, _value(homes[0], name, value) if len(homes) == 1 else "")
    near = nearest(name, names)
    if near and not name.startswith(f"{near[0]}_"):  # as loss_args
        return KeySuggestion(((*around, near[0]),), is_slip=True)
    listed = _listed(around, names)
    if (
        not near
        and {"entry", "args"} <= {*names}
        and len(text := to_toml({name: value})) < _LONGEST
        and not _is_hidden(name, value)
    ):
        listed += f"; an argument of its entry stands in args: args = {text}"
    return KeySuggestion((), note=listed)


def _foreign(path: KeyPath, value: object, names: Sequence[str]) -> KeySuggestion | None:
    """Return the suggestion for a name of another tool: by the table it stands in, then by the name alone."""
    around, name = path[:-1], str(path[-1])
    if (meaning := meaning_in(_table_of(around), name)) is not None:
        return _meant(meaning, path, value)
    local = next((key for key, others in LOCAL.items() if key in names and plain(name) in others), None)
    if local is not None:
        return KeySuggestion(((*around, local),), _value((*around, local), name, value))
    if (meaning := meaning_of(name)) is not None:
        return _meant(meaning, path, value)
    option = f"--{name.replace('_', '-')}={value if isinstance(value, str) else to_toml(value)}"
    if around == ("slurm",) and isinstance(value, str | int) and why_refused(option) is None:
        return KeySuggestion((), note=f"it is an option of sbatch: extra = [{to_toml(option)}]")
    return None


def _table_of(around: KeyPath) -> str:
    """Return the name of a table without the names of evaluation sets and the numbers of a list."""
    return dotted(tuple(part for part in without_set(around) if isinstance(part, str))) or "."


def _meant(meaning: Meaning, path: KeyPath, value: object) -> KeySuggestion:
    around, name = path[:-1], str(path[-1])
    if not meaning.key:
        shown = "..." if isinstance(value, dict | list) or _is_hidden(name, value) else to_toml(value)
        return KeySuggestion((), note=meaning.note.replace("{}", shown))
    key: KeyPath = tuple(meaning.key.split("."))
    if len(key) == 1 and key[0] in keys_at(around):  # as kubernetes.env
        key = (*around, *key)
    elif around and meaning.key.startswith(f"{_table_of(around)}."):
        key = (*around, *key[_table_of(around).count(".") + 1 :])
    elif "args" in keys_at(around) and key[:1] == around[:1] and key[1:-1] == ("args",):
        key = (*around, *key[1:])  # of these parameters, not of all
    if "{}" not in meaning.form and value is False:
        return KeySuggestion((), note="leave it out: that is how it is without it")
    # A fixed form stands for a switch that is on; with `eval_strategy = "steps"` it would mean something else.
    is_switch = value is True or (isinstance(value, str) and value in meaning.form.strip('"').split())
    is_same = "{}" in meaning.form or is_switch
    return KeySuggestion((key,), _formed(key, meaning.form, name, value) if is_same else "", meaning.note)


def _formed(key: KeyPath, form: str, name: str, value: object) -> str:
    """Return the value to write at *key*, in the form that the key takes; empty if *value* does not convert."""
    import tomli

    if len(key) == 1 or _is_hidden(name, value) or (isinstance(value, bool) and '"{}"' in form):
        return ""
    if "{}" in form and (isinstance(value, str) or form == "{}"):
        return _value(key, name, value)
    text = form.replace("{}", to_toml(value)).replace("{{", "{").replace("}}", "}")
    try:
        made = tomli.loads(f"v = {text}")["v"]
    except tomli.TOMLDecodeError:
        return ""
    return text if _is_free(key) or accepts(key, made) else ""


def _value(key: KeyPath, name: str, value: object) -> str:
    """Return a value as *key* takes it, unchanged or corrected; empty if it does not fit."""
    if len(key) < 2 or _is_hidden(name, value):
        return ""
    meant = value if _is_free(key) or accepts(key, value) else same_value(key, value)
    text = "" if meant is None else to_toml(meant)
    return text if len(text) <= _LONGEST else ""


def _is_hidden(name: str, value: object) -> bool:
    """Return whether a value may be a secret: remedies reach terminals and logs."""
    return redaction.is_secret(name) or (isinstance(value, str) and redaction.mask_url(value) != value)


def _is_free(key: KeyPath) -> bool:
    return annotation_at(key) is None or not keys_at(key[:-1])


def _homes(name: str, around: KeyPath, value: object) -> tuple[KeyPath, ...]:
    """Return every key called *name*, keys of the surrounding tables first; of other tables, those that take *value*."""
    if around and (name == "extends" or (name in Job.model_fields and is_table(value))):
        return ((name,),)
    above = [around[:length] for length in range(len(around) - 1, 0, -1)]
    if home := next((table for table in above if name in keys_at(table)), None):
        return ((*home, name),)
    tables = [table for table in Job.model_fields if table not in _OF_OTHER_PROGRAMS]
    homes = [(table, name) for table in tables if name in keys_at((table,))]
    return tuple(home for home in homes if len(homes) > 1 or accepts(home, value))


def _in_matrix(path: KeyPath, value: object) -> KeySuggestion:
    """Return the suggestion for a key in [matrix]: one of its keys, or an axis."""
    name, own = str(path[-1]), keys_at(path[:-1])
    if near := nearest(name, own, _SURE if isinstance(value, list) else 0.6):
        return KeySuggestion(((*path[:-1], near[0]),), is_slip=True)
    listed = f"{_listed(path[:-1], own)}; an axis stands below [matrix.axes], under the whole name of its key, as optimizer.args.lr"
    return KeySuggestion((), note=listed)


def _listed(around: KeyPath, names: Sequence[str]) -> str:
    if around:
        return f"[{dotted(around)}] takes: {', '.join(names)}"
    return f"a job file has the tables: {', '.join(each for each in names if each != 'extends')}"


def _is_beside(source: Source, path: KeyPath, key: KeyPath) -> bool:
    """Return whether the text that has the key at *path*, or one that is laid over it, also has *key*."""
    place, of_key = source.look(path), source.look(key)
    layers = [layer for layer in source.layers if place and of_key and layer in {place[0], of_key[0]}]
    return bool(of_key and layers and layers[-1] is of_key[0])


def has_header(source: Source, table: KeyPath) -> bool:
    """Return whether a table begins with a header, and not with a brace or by a dotted key."""
    if (place := source.look(table)) is None or place[1].value is not None or place[1].key is None:
        return False
    layer, start = place[0], place[1].key.start
    return "[" in layer.text[layer.text.rfind("\n", 0, start) + 1 : start]
