"""torchrun's options that no key of [torchrun] sets, and who decides them instead."""

from __future__ import annotations

# By the option's name, with underscores; a test compares them with torch's own parser.
DECIDED_ELSEWHERE: dict[str, str] = {
    "nnodes": "this is nodes.min and nodes.max here",
    "nproc_per_node": "this is nodes.nproc_per_node here",
    "rdzv_endpoint": "this is nodes.endpoint here",
    "master_addr": "this is nodes.endpoint here",
    "master_port": "this is nodes.endpoint here",
    "local_addr": "it belongs to one machine, not to the job: nodes.interface names the network",
    "standalone": "leave nodes.endpoint out: one machine needs no more",
    "rdzv_id": "the run's id takes its place: elasticflow run --run-id ID",
    "node_rank": "it belongs to one machine, not to the job: elasticflow run --node-rank N, or $NODE_RANK",
    "max_restarts": "this is restarts.budget here, which counts the failures of the whole run",
    "shutdown_timeout": "this is snapshots.grace here",
    "signals_to_handle": "the supervisor takes SIGTERM, SIGINT and SIGHUP: workers leave with a snapshot within snapshots.grace",
    "event_log_handler": "what happens to a run is written to its events.jsonl",
    "logs_specs": "every line of every rank is kept in the run folder: elasticflow logs",
    "duplicate_stdout_filters": "every line of every rank is kept in the run folder: elasticflow logs, or local_ranks_filter",
    "duplicate_stderr_filters": "every line of every rank is kept in the run folder: elasticflow logs, or local_ranks_filter",
    "virtual_local_rank": "each worker chooses the GPU of its local rank by itself",
    "role": "all workers of a job have one role",
    "module": "what is started is the generated train.py",
    "no_python": "what is started is the generated train.py",
    "run_path": "what is started is the generated train.py",
    "training_script": "what is started is the generated train.py",
    "training_script_args": "what is started is the generated train.py; the job file holds its values",
}
