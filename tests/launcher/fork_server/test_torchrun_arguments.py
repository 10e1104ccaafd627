"""What torchrun's own parser makes of a launch's arguments, as the fork server tells the agent."""

from __future__ import annotations

import pytest

from elasticflow.launcher.fork_server.probe import read_arguments
from elasticflow.launcher.fork_server.protocol import MESSAGES, Ready, TorchrunOptions, TorchrunRefusedError
from elasticflow.protocol.messages import RefusedModule

_NODES = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what torchrun warns of otherwise."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_arguments_of_a_plain_job_ask_for_its_workers_only() -> None:
    """Everything is kept, and nothing shown, unless the job says so."""
    assert TorchrunOptions(nproc=3) == read_arguments([*_NODES, "--nproc-per-node=3", "train.py"])


def test_filter_leaves_out_what_is_shown() -> None:
    """`[torchrun] local_ranks_filter` and `tee` as torchrun reads them; redirects change nothing."""
    arguments = [
        "--tee=3",
        "--redirects=1",
        "--local-ranks-filter=1",
        "--role=trainer",
        "--numa-binding=node",
    ]
    options = read_arguments([*_NODES, "--nproc-per-node=3", *arguments, "train.py"])

    assert TorchrunOptions(3, "trainer", shown_stdouts=(1,), shown_stderrs=(1,), numa="node") == options


def test_tee_is_honoured_by_rank_and_stream() -> None:
    """What `[torchrun] tee` asks for by rank; ranks it does not name are not shown."""
    options = read_arguments([*_NODES, "--nproc-per-node=3", "--tee=0:2,1:3", "train.py"])

    assert ((1,), (0, 1)) == (options.shown_stdouts, options.shown_stderrs)


def test_workers_are_counted_where_the_job_says_so() -> None:
    """`nproc_per_node = "cpu"` is a number once torch has looked at this machine."""
    assert read_arguments([*_NODES, "--nproc-per-node=cpu", "train.py"]).nproc >= 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--nproc-per-nodes=2", "train.py"), "unrecognized arguments: --nproc-per-nodes=2"),
        ((), "the following arguments are required: training_script"),
        (
            ("--nproc-per-node=many", "train.py"),
            "ValueError: Unsupported nproc_per_node value: many",
        ),
    ],
)
def test_what_torchrun_refuses_is_told_in_its_own_words(
    arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, which is the last that the agent says and the one that the supervisor repeats."""
    with pytest.raises(TorchrunRefusedError) as refused:
        read_arguments([*_NODES, *arguments])

    assert str(refused.value).startswith(f"torchrun refuses the launch's arguments: {reason}")
    assert "\n" not in str(refused.value)
    assert "" == capsys.readouterr().err


def test_options_travel_in_the_message_that_the_server_is_ready() -> None:
    """What is sent is what arrives: tuples and all."""
    options = TorchrunOptions(2, "trainer", (0,), (0, 1), "node")
    for message in (Ready((RefusedModule("a", "b"),), options=options), Ready((), refusal="why")):
        assert message == MESSAGES.decode(MESSAGES.encode(message).encode())
