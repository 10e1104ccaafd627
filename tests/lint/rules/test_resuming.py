"""Scripts that a restart begins anew."""

from __future__ import annotations

import pytest

from elasticflow.lint.check import lint_source
from tests.lint.scripts import HEAD

PARSER = "parser = argparse.ArgumentParser()\n{options}\nargs = parser.parse_args()\n"
LOOP = "for step in range(99):\n    model(x).backward()\n    {save}\n"
SAVE = "torch.save(model.state_dict(), f'{step}.pt')"
STATE = "model.load_state_dict(torch.load({path}, 'cpu'))"
ENTRY = "import argparse\nimport numpy as np\nimport numpy\nimport json\n" + HEAD


def told(body: str) -> list[tuple[str, str, str]]:
    """Return code, message and help of each finding about resuming."""
    found = lint_source(f"{ENTRY}{body}".encode(), "train.py")
    return [
        (each.code, each.message, each.help or "")
        for each in found
        if each.code in {"EF616", "EF617", "EF618"}
    ]


def codes(body: str) -> list[str]:
    """Return the codes of the findings about resuming."""
    return [code for code, _, _ in told(body)]


@pytest.mark.parametrize(
    ("before", "save", "after", "expected"),
    [
        ("", SAVE, "", ["EF616"]),
        ("tokens = load_tokens('a.bin')\nmore = np.load('a.npy')", SAVE, "", ["EF616"]),
        ("import yaml\nconfig = yaml.safe_load(open('c'))", SAVE, "", ["EF616"]),
        ("target.load_state_dict(model.state_dict())", SAVE, "", ["EF616"]),
        ("model = AutoModel.from_pretrained('gpt2')", "model.save_pretrained(args.out)", "", ["EF616"]),
        ("", "accelerator.save_state('out')", "", ["EF616"]),
        ("", "fabric.save('out', state)", "", ["EF616"]),
        ("", "pass", "torch.save(model.state_dict(), 'end.pt')", ["EF616"]),
        ("", SAVE, STATE.format(path="'best.pt'") + "\ntest(model)", ["EF616"]),
        ("", "pass", "", ["EF616"]),
        (
            PARSER.format(options="parser.add_argument('--test', action='store_true')")
            + "if args.test:\n    "
            + STATE.format(path="'last.pt'"),
            SAVE,
            "",
            ["EF616"],
        ),
        (STATE.format(path="'last.pt'"), SAVE, "", []),
        ("resume_from_latest(model)", SAVE, "", []),
        ("utils.load_checkpoint(model, optimizer)", SAVE, "", []),
        ("start = setup(model, checkpoint_path='x')", SAVE, "", []),
        ("accelerator.load_state('out')", "accelerator.save_state('out')", "", []),
        ("model = AutoModel.from_pretrained(out_dir)", "model.save_pretrained(out_dir)", "", []),
        ("", "save_it_elsewhere(model)", "", []),
        ("import elasticflow\nrun = elasticflow.join()", SAVE, "", []),
    ],
)
def test_what_no_start_loads(before: str, save: str, after: str, expected: list[str]) -> None:
    """Data, copies and public weights are no load of one's own; what another file may load is left alone."""
    assert codes(f"{before}\n{LOOP.format(save=save)}{after}\n") == expected


def test_a_module_without_a_start_is_left_alone() -> None:
    """Who loads may be the file that uses it."""
    assert (
        codes("def train(model):\n    for step in range(9):\n        model(x).backward()\n        " + SAVE)
        == []
    )


GUARDED = PARSER + "if {test}:\n    " + STATE + "\n{other}" + LOOP
FLAG = "parser.add_argument('--resume', action='store_true')"
PATH = "parser.add_argument('--resume', default='')"


@pytest.mark.parametrize(
    ("options", "test", "expected"),
    [
        (FLAG, "args.resume", ["EF617"]),
        (PATH, "args.resume", ["EF617"]),
        ("parser.add_argument('-r', '--resume', type=str)", "args.resume is not None", ["EF617"]),
        ("parser.add_argument('--init-from', default='scratch')", "args.init_from == 'resume'", ["EF617"]),
        ("mode = 'scratch'", "mode == 'resume'", ["EF617"]),
        (FLAG, "args.resume and os.path.exists('last.pt')", ["EF617"]),
        ("parser.add_argument('--resume', default='last.pt')", "args.resume", []),
        ("parser.add_argument('--fresh', action='store_true')", "not args.fresh", []),
        ("parser.add_argument('--fresh', action='store_false', dest='resume')", "args.resume", []),
        ("parser.add_argument('--resume', action='store')", "args.resume", ["EF617"]),
        (FLAG, "args.resume or os.path.exists('last.pt')", []),
        (FLAG, "os.path.exists('last.pt')", []),
        (FLAG + "\nargs.resume = newest()", "args.resume", []),
        ("parser.add_argument('--resume', **more)", "args.resume", []),
        ("parser.add_argument('--resume', default=newest())", "args.resume", []),
        ("", "args.resume", []),
    ],
)
def test_loads_by_an_argument(options: str, test: str, expected: list[str]) -> None:
    """Off by default, for sure; nothing is said where something else may have it on."""
    body = GUARDED.format(options=options, test=test, path="'last.pt'", other="", save=SAVE)
    assert codes(body) == expected


def test_another_load_without_the_argument_is_enough() -> None:
    """The script then continues by itself, perhaps."""
    other = "if os.path.exists('auto.pt'):\n    " + STATE.format(path="'auto.pt'") + "\n"
    assert codes(GUARDED.format(options=FLAG, test="args.resume", path="'x'", other=other, save=SAVE)) == []


def test_arguments_are_followed_into_functions() -> None:
    """A parameter is what its calls pass; a function is reached as its calls are."""
    body = PARSER.format(options=PATH) + (
        "def load(path):\n    model.load_state_dict(torch.load(path, 'cpu'))\n"
        "def main(checkpoint):\n    if checkpoint:\n        load(checkpoint)\n"
        "    for step in range(9):\n        model(x).backward()\n"
        "        checkpoint = f'{step}.pt'\n        torch.save(model.state_dict(), checkpoint)\n"
        "main(args.resume)\n"
    )
    [(code, message, _)] = told(body)
    assert code == "EF617"
    assert "only by --resume, which is off by default" in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import lightning as L\ntrainer = L.Trainer()\ntrainer.fit(model, data)", ["EF618"]),
        ("import lightning.pytorch as pl\npl.Trainer(max_epochs=3).fit(model)", ["EF618"]),
        ("from pytorch_lightning import Trainer\nt = Trainer()\nt.fit(model, ckpt_path='last')", []),
        ("import lightning as L\nt = L.Trainer()\nt.fit(model, a, b, None, 'last')", []),
        ("import lightning as L\nt = L.Trainer()\nt.fit(model, **more)", []),
        ("from sklearn.svm import SVC\nt = SVC()\nt.fit(x, y)", []),
        ("from transformers import Trainer\nt = Trainer(model)\nt.train()", ["EF618"]),
        ("from transformers import Trainer\nt = Trainer(model)\nt.train(resume_from_checkpoint=last)", []),
        ("model.train()", []),
    ],
)
def test_trainers_that_are_not_told_where_to_go_on(body: str, expected: list[str]) -> None:
    """Those of Lightning and transformers; other `fit` and `train` are none."""
    assert codes(body) == expected
