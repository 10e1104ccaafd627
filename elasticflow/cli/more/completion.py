"""`elasticflow completion SHELL`: the script that makes a shell complete the command line."""

from __future__ import annotations

import os
from pathlib import Path

import click

# Each script calls the command itself (see `cli/completion_candidates.py`), which answers with one candidate a line, a tab before
# the description. No blank follows an unfinished word: a folder, a table of the job file, a key whose value is next.
# click's own scripts are enough for commands and options, but not for `--set` and files: the bash script passes words
# as bash cuts them, at each "=" and ":", and splits a name with a blank; the zsh script adds a blank after each
# candidate; the fish script cuts candidates and help at the first comma, and sorts them.
SCRIPTS = {
    "bash": r"""
_elasticflow() {
    local line=${COMP_LINE:0:COMP_POINT}
    mapfile -t COMPREPLY < <(
        _ELASTICFLOW_COMPLETE=bash "$1" "${line#*"$1"}" "$COMP_WORDBREAKS" 2>/dev/null
    )
    [[ ${COMPREPLY[0]-} == *[/=.:] ]] && compopt -o nospace
}
complete -F _elasticflow elasticflow
""",
    "zsh": r"""
#compdef elasticflow
_elasticflow() {
    local -a closed open
    local line value
    [[ $PREFIX == \~* ]] && { _files; return }
    for line in "${(@f)$(
        _ELASTICFLOW_COMPLETE=zsh "${words[1]}" "${(@Q)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null
    )}"; do
        [[ -n $line ]] || continue
        value=${line%%$'\t'*}
        if [[ $value == *[/=.] ]]; then
            open+=("${value//:/\\:}:${line#*$'\t'}")
        else
            closed+=("${value//:/\\:}:${line#*$'\t'}")
        fi
    done
    (( $#closed )) && _describe -V elasticflow closed
    (( $#open )) && _describe -V elasticflow open -S ''
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _elasticflow "$@"
else
    compdef _elasticflow elasticflow
fi
""",
    "fish": r"""
function __elasticflow
    set -l before (commandline -opc)
    set -l word (commandline -ct)
    _ELASTICFLOW_COMPLETE=fish $before[1] $before[2..-1] "$word" 2>/dev/null
end
complete -c elasticflow -f -k -a '(__elasticflow)'
""",
}
_STARTUP = {"bash": ".bashrc", "zsh": ".zshrc"}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(SCRIPTS)))
@click.option("--install", is_flag=True, help="Write the script, and make the shell load it at its start.")
def command(shell: str, *, install: bool) -> None:
    """Print the script that makes SHELL complete commands, options and their values.

    Job files, runs, snapshots, codes, and the keys and values of --set are completed too.

    \b
    elasticflow completion bash --install      once; new shells complete
    source <(elasticflow completion bash)      this shell only
    source <(elasticflow completion zsh)
    elasticflow completion fish | source
    """
    if not install:
        click.echo(SCRIPTS[shell].strip())
        return
    try:
        script, startup = _install(shell)
    except OSError as error:
        raise click.ClickException(f"cannot write what makes {shell} complete: {error}") from error
    click.echo(f"wrote {script}{f', which {startup} reads' if startup else ''}; new shells complete")


def _install(shell: str) -> tuple[Path, Path | None]:
    """Write a shell's script and, unless present, the line that loads it; return both files (fish needs no line: None)."""
    home = Path.home()
    if shell == "fish":
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions"
        return _write(folder / "elasticflow.fish", shell), None
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    script = _write(data / "elasticflow" / f"completion.{shell}", shell)
    startup = Path(os.environ.get("ZDOTDIR") or home if shell == "zsh" else home) / _STARTUP[shell]
    line = f'[ -r "{script}" ] && source "{script}"\n'
    text = startup.read_bytes() if startup.exists() else b""
    if line.encode() not in text:
        # Appended: if the disk is full, the user's own lines stay.
        with startup.open("ab") as file:
            file.write((b"" if text.endswith(b"\n") or not text else b"\n") + line.encode())
    return script, startup


def _write(path: Path, shell: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCRIPTS[shell].lstrip(), "utf-8")
    return path
