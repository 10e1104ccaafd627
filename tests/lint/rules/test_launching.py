"""Fixed ports and mp.spawn."""

from __future__ import annotations

import pytest

from tests.lint.scripts import codes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("os.environ['MASTER_PORT'] = '29500'", ["EF621"]),
        ("os.environ['MASTER_PORT'] = str(29500)", ["EF621"]),
        ("PORT = 29500\nos.environ['MASTER_PORT'] = str(PORT)", ["EF621"]),
        ("os.environ.update({'MASTER_ADDR': 'x', 'MASTER_PORT': '1234'})", ["EF621"]),
        ("dist.init_process_group('nccl', init_method='tcp://localhost:29500')", ["EF621"]),
        ("dist.init_process_group('nccl', 'tcp://10.0.0.1:29500')", ["EF621"]),
        ("if __name__ == '__main__':\n    os.environ['MASTER_PORT'] = '29500'", ["EF621"]),
        ("os.environ['MASTER_PORT'] = '0'", []),
        ("os.environ['MASTER_PORT'] = str(free_port())", []),
        ("os.environ['MASTER_PORT'] = os.environ.get('MASTER_PORT', '29500')", []),
        ("os.environ.setdefault('MASTER_PORT', '29500')", []),
        ("if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'", []),
        ("if 'SLURM_JOB_ID' in os.environ:\n    pass\nelse:\n    os.environ['MASTER_PORT'] = '29500'", []),
        ("dist.init_process_group('nccl', init_method='env://')", []),
        ("dist.init_process_group('nccl', init_method='file:///x')", []),
        ("dist.init_process_group('nccl', init_method=f'tcp://localhost:{port}')", []),
        ("dist.init_process_group('nccl', init_method=args.url)", []),
        ("parser.add_argument('--url', default='tcp://localhost:29500')", []),
        ("settings['MASTER_PORT'] = '29500'", []),
    ],
)
def test_fixed_ports(body: str, expected: list[str]) -> None:
    """Written down, and used whatever the environment says."""
    assert codes(body + "\n") == expected


SPAWN = "def work(i):\n    torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SPAWN + "if __name__ == '__main__':\n    mp.spawn(work, nprocs=2)", ["EF622"]),
        (SPAWN + "def main():\n    torch.multiprocessing.spawn(work, nprocs=2)\nmain()", ["EF622"]),
        (SPAWN + "def main():\n    if args.spawn:\n        mp.spawn(work)\nmain()", []),
        (
            SPAWN
            + "def main():\n    if 'RANK' in os.environ:\n        return work(0)\n    mp.spawn(work)\nmain()",
            [],
        ),
        (SPAWN + "def main():\n    mp.spawn(work)\nif args.spawn:\n    main()", []),
        (SPAWN + "os.environ['LOCAL_RANK'] = '1'\nmp.spawn(work, nprocs=2)", []),
        ("def work(i):\n    pass\nmp.spawn(work, nprocs=2)", []),
        ("work(int(os.environ['LOCAL_RANK']))", []),
    ],
)
def test_spawn_under_torchrun(body: str, expected: list[str]) -> None:
    """Called for sure, in a script that reads what torchrun alone sets."""
    assert codes(body + "\n") == expected


OPTION = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', default=0)\nargs = parser.parse_args()\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (OPTION + "torch.cuda.set_device(args.local_rank)", ["EF623"]),
        (OPTION.replace("local_rank", "local-rank", 1) + "torch.cuda.set_device(args.local_rank)", ["EF623"]),
        (OPTION, []),
        (
            OPTION
            + "args.local_rank = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(args.local_rank)",
            [],
        ),
        (OPTION.replace("default=0", "default=os.getenv('LOCAL_RANK')") + "f(args.local_rank)", []),
        (OPTION + "utils.init_distributed_mode(args)\ntorch.cuda.set_device(args.local_rank)", []),
        ("import deepspeed\n" + OPTION + "torch.cuda.set_device(args.local_rank)", []),
    ],
)
def test_a_local_rank_that_nobody_passes(body: str, expected: list[str]) -> None:
    """Read from the command line only; a helper of another file may set it from the environment."""
    assert codes(body + "\n") == expected
