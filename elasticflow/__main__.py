"""The command: `elasticflow` and `python -m elasticflow`."""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave with its exit code."""
    from elasticflow.cli.main import run

    run()


if __name__ == "__main__":
    main()
