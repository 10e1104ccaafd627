"""Names of torch, torchrun, Lightning, Hugging Face, Accelerate and torchtitan, and what each is in a job file.

Read when a key or an option is not known, and no sooner. Tests find every name among those of the tool that is said
to have it, and every key that is pointed at in the models. Options of torchrun that no key of [torchrun] sets are in
`torchrun_options.py`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOLS = MappingProxyType(
    {
        "torch": "torch's DataLoader, DistributedDataParallel and optimizers",
        "torchrun": "torchrun, and variables of the environment that it or torch reads or sets",
        "lightning": "Lightning's Trainer",
        "hf": "Hugging Face's TrainingArguments",
        "accelerate": "Accelerate's configuration file and its Accelerator",
        "titan": "torchtitan's configuration",
        "other": "scripts, papers and other tools",
    }
)


class Meaning(NamedTuple):
    """What a name of another tool is in a job file.

    Attributes:
        key: The key that holds it, dotted; a table without a dot; empty where nothing holds it.
        form: What is written there, `{}` standing for the value.
        note: Why nothing holds it, or what does, `{}` standing for the value; else what is different.
    """

    key: str
    form: str = "{}"
    note: str = ""


class Row(NamedTuple):
    """One meaning, and the names that have it: by tool, with blanks between them."""

    meaning: Meaning
    names: Mapping[str, str]


def _key(key: str, form: str = "{}", note: str = "", **names: str) -> Row:
    """Names of what a key holds."""
    return Row(Meaning(key, form, note), names)


def _itself(note: str, **names: str) -> Row:
    """Names of what elasticflow does by itself."""
    return Row(Meaning("", note=f"leave it out: {note}"), names)


def _say(note: str, **names: str) -> Row:
    """Names of what several keys do together; `{}` stands for the value."""
    return Row(Meaning("", note=note), names)


def _none(note: str, **names: str) -> Row:
    """Names of what a job file does not offer."""
    return Row(Meaning("", note=f"no key does this: {note}"), names)


_STEPS, _EPOCHS, _SECONDS, _GIVEN = '"{} steps"', '"{} epochs"', '"{} s"', '"{}"'
_DDP = "each worker holds the whole model, and gradients are averaged by DistributedDataParallel"
_WARMUP = (
    '[lr_scheduler] with entry = "torch.optim.lr_scheduler:LinearLR" and args = { total_iters = {} } warms up;\n'
    "a function of your own that gets the optimizer may join several schedules"
)
_COSINE = '[lr_scheduler] with entry = "torch.optim.lr_scheduler:CosineAnnealingLR" and args = { T_max = {} } does this'
_BETAS = "both betas in one list"
_NO_SINKS = "all metrics are in the run folder's metrics.jsonl"
_SHORT = "`elasticflow validate --deep-step` tries a step; --set train.steps=3 makes a run short"
_RESUMES = (
    "a run goes on from its newest snapshot: `elasticflow resume NAME`, or `run --run-id ID` again and again"
)
_SPLIT = "it follows from global_batch_size and micro_batch_size at every number of workers"
_VARIABLES = "workers have the environment of the command: set it there"

ROWS: tuple[Row, ...] = (
    # Tables.
    _key("dataset", other="data datamodule dataloader datasets data_module train_data"),
    _key("evaluation", other="eval val validate test", titan="validation validator"),
    _key("train", other="trainer training_args fit", titan="training"),
    _key("snapshots", other="checkpoints checkpointing ckpt snapshot", titan="checkpoint"),
    _key("optimizer", other="optimizers optimiser"),
    _key("lr_scheduler", other="scheduler sched schedule lr_schedule schedulers"),
    _key("nodes", other="distributed cluster resources launcher hardware"),
    _key("logging", other="logs log"),
    _key("job", other="experiment general meta"),
    _key("matrix", other="sweep grid parameters"),
    _key("extends", other="defaults base bases inherits include_file"),
    # The job and its length.
    _key("job.name", hf="run_name", other="exp_name experiment_name job_name title"),
    _key("job.seed", hf="data_seed", other="random_seed manual_seed global_seed rng_seed seed_everything"),
    _key("job.path", other="pythonpath python_path sys_path code_dir"),
    _key("train.epochs", hf="num_train_epochs", lightning="max_epochs", other="num_epochs n_epochs nb_epochs total_epochs"),
    _key(
        "train.steps",
        hf="max_steps",
        lightning="max_steps",
        other="max_iters num_steps total_steps num_iterations train_steps max_train_steps num_training_steps iterations max_update",
    ),
    _key("train.precision", '"bf16"', hf="bf16", other="amp use_amp autocast"),
    _key("train.precision", '"fp16"', hf="fp16", other="half"),
    _key("train.precision", accelerate="mixed_precision", titan="mixed_precision_param dtype", hf="half_precision_backend"),
    _key("train.compile", "true", hf="torch_compile", accelerate="dynamo_backend", other="compile_model use_compile"),
    _key("train.ema", other="ema_decay model_ema_decay"),
    _key("train.consistency", '"exact"', "the same bits at any number of nodes", hf="full_determinism", lightning="deterministic"),
    _key("train.on_nonfinite", '"stop"', "which it is if left out", lightning="detect_anomaly"),
    _key("train.threads", torchrun="OMP_NUM_THREADS", other="num_threads torch_threads cpu_threads"),
    # The model.
    _key("model.entry", _GIVEN, other="_target_ model_name arch architecture model_class model_type"),
    _key("model.args", other="model_args model_kwargs model_config model_params kwargs params"),
    _key("model.loss", _GIVEN, other="criterion loss_fn loss_function objective"),
    _key("model.step", _GIVEN, other="training_step train_step step_fn forward_step"),
    _key("model.weights", _GIVEN, titan="initial_load_path", other="pretrained pretrained_path init_from load_from finetune"),
    # The optimizer and the schedule.
    _key("optimizer.entry", _GIVEN, hf="optim", other="optimizer_name optimizer_type opt optimizer_class"),
    _key("optimizer.args", hf="optim_args", other="optimizer_args optimizer_kwargs optimizer_params"),
    _key("optimizer.args.lr", torch="lr", hf="learning_rate", other="base_lr init_lr initial_lr max_lr"),
    _key("optimizer.args.weight_decay", torch="weight_decay", hf="weight_decay", other="wd"),
    _key("optimizer.args.betas", torch="betas"),
    _key("optimizer.args.betas", "[{}, 0.999]", _BETAS, hf="adam_beta1", other="beta1"),
    _key("optimizer.args.betas", "[0.9, {}]", _BETAS, hf="adam_beta2", other="beta2"),
    _key("optimizer.args.eps", torch="eps", hf="adam_epsilon"),
    _key("optimizer.args.momentum", torch="momentum"),
    _key("optimizer.args.nesterov", torch="nesterov"),
    _key(
        "optimizer.clip_grad_norm",
        hf="max_grad_norm",
        lightning="gradient_clip_val",
        titan="max_norm",
        other="grad_clip clip_grad clip_norm grad_norm_clip gradient_clip gradient_clipping max_gradient_norm clip_gradients",
    ),
    _key("lr_scheduler.entry", _GIVEN, hf="lr_scheduler_type", other="scheduler_type scheduler_name sched_name decay_lr lr_policy"),
    _key("lr_scheduler.args", hf="lr_scheduler_kwargs", other="scheduler_args scheduler_kwargs"),
    _say(_WARMUP, hf="warmup_steps", other="warmup_iters num_warmup_steps lr_warmup_steps"),
    _say(_WARMUP.replace("{}", "..."), hf="warmup_ratio", titan="warmup_steps", other="warmup warmup_epochs"),
    _say(_COSINE.replace("T_max", "eta_min"), other="min_lr lr_min end_lr"),
    _say(_COSINE, other="lr_decay_iters decay_steps"),
    _key("lr_scheduler.interval", '"step"', "which it is if left out", accelerate="step_scheduler_with_optimizer"),
    # The data.
    _key("dataset.entry", _GIVEN, other="train_dataset dataset_name dataset_class train_set"),
    _key("dataset.args", other="dataset_args data_args dataset_kwargs"),
    _key(
        "dataset.global_batch_size",
        note="the samples of one step, over all workers",
        torch="batch_size",
        other="train_batch_size total_batch_size effective_batch_size global_batch bs",
    ),
    _key(
        "dataset.micro_batch_size",
        note="the most samples that a worker takes at once; global_batch_size is the samples of one step",
        hf="per_device_train_batch_size per_gpu_train_batch_size",
        titan="local_batch_size",
        other="batch_size_per_gpu per_device_batch_size device_batch_size micro_batch train_micro_batch_size_per_gpu",
    ),
    _key("dataset.num_workers", hf="dataloader_num_workers", torch="num_workers", other="data_workers loader_workers n_workers"),
    _key("dataset.tail", '"drop"', torch="drop_last", hf="dataloader_drop_last"),
    _key("dataset.collate", _GIVEN, torch="collate_fn", other="data_collator collator"),
    _key("dataset.samples", other="num_samples dataset_size num_examples"),
    _key("dataset.prepare", _GIVEN, other="prepare_data download download_data"),
    # The evaluation.
    _key("evaluation.entry", _GIVEN, other="val_dataset eval_dataset test_dataset valid_dataset"),
    _key("evaluation.every", _STEPS, hf="eval_steps", titan="freq", lightning="val_check_interval", other="eval_interval eval_every eval_freq val_every val_interval val_freq"),
    _key("evaluation.every", _EPOCHS, lightning="check_val_every_n_epoch", other="eval_every_n_epochs"),
    _key("evaluation.every", '"1 epoch"', hf="eval_strategy", other="evaluation_strategy"),
    _key("evaluation.batch_size", hf="per_device_eval_batch_size per_gpu_eval_batch_size", other="eval_batch_size val_batch_size test_batch_size"),
    _key("evaluation.metrics", other="compute_metrics eval_metrics"),
    _key("evaluation.best", '"max {}"', 'or "min {}"', hf="metric_for_best_model", other="monitor best_metric"),
    _key("evaluation.best", '"max accuracy"', "with the metric that counts", hf="greater_is_better"),
    # Snapshots.
    _key(
        "snapshots.uri",
        _GIVEN,
        hf="output_dir",
        lightning="default_root_dir",
        accelerate="project_dir",
        titan="dump_folder folder",
        other="dir save_dir out_dir output checkpoint_dir ckpt_dir checkpoint_path ckpt_path save_path dirpath save_folder",
    ),
    _key("snapshots.every", _STEPS, hf="save_steps", other="save_every save_interval save_freq checkpoint_every checkpoint_interval ckpt_every ckpt_interval every_n_train_steps"),
    _key("snapshots.every", _EPOCHS, other="every_n_epochs save_every_n_epochs"),
    _key("snapshots.every", '"1 epoch"', hf="save_strategy"),
    _key("snapshots.keep.last", hf="save_total_limit", titan="keep_latest_k", other="keep_last keep_checkpoints max_to_keep max_checkpoints num_checkpoints keep_last_n"),
    _key("snapshots.keep.best", other="save_top_k keep_best"),
    _key("snapshots.keep.best", "1", "with evaluation.best", hf="load_best_model_at_end", other="save_best save_best_only"),
    _key("snapshots.include", other="stateful extra_state save_state"),
    # Nodes, restarts, logs.
    _key("nodes.nproc_per_node", torchrun="NPROC_PER_NODE LOCAL_WORLD_SIZE", lightning="devices gpus num_processes", accelerate="num_processes", other="ngpus num_gpus n_gpus n_gpu gpus_per_node ngpus_per_node nproc num_devices"),
    _key("nodes.max", note="nodes.min is the fewest it goes on with", lightning="num_nodes", accelerate="num_machines", torchrun="NNODES", other="n_nodes max_nodes"),
    _key("nodes.min", note="nodes.max is the most", other="min_nodes"),
    _key("nodes.endpoint", '"host:29400"', "the first machine and a port", torchrun="MASTER_ADDR MASTER_PORT", accelerate="main_process_ip main_process_port", other="dist_url init_method"),
    _key("nodes.interface", _GIVEN, torchrun="NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME", other="ifname network_interface"),
    _key("restarts.budget", torchrun="TORCHELASTIC_MAX_RESTARTS", other="max_retries retries max_failures"),
    _key("restarts.hang_timeout", _SECONDS, hf="ddp_timeout", titan="train_timeout_seconds", torch="timeout", other="dist_timeout nccl_timeout"),
    _key("logging.level", hf="log_level", other="loglevel verbosity"),
    _key("logging.every", _STEPS, hf="logging_steps", lightning="log_every_n_steps", titan="log_freq", other="log_every log_interval log_steps log_frequency print_freq print_every"),
    _key("ddp.find_unused_parameters", hf="ddp_find_unused_parameters"),
    _key("ddp.bucket_cap_mb", hf="ddp_bucket_cap_mb"),
    _key("ddp.sync_batchnorm", other="sync_bn syncbn"),
    _key("torchrun.numa_binding", '"node"', accelerate="enable_cpu_affinity"),
    # What is done without being asked for.
    _itself("each epoch has an order of its own, made of job.seed", torch="shuffle", other="shuffle_data"),
    _itself("workers share out the samples, each once an epoch", torch="sampler batch_sampler", lightning="use_distributed_sampler replace_sampler_ddp", accelerate="split_batches", other="distributed_sampler"),
    _itself("it goes on at the very sample", hf="ignore_data_skip"),
    _itself(_SPLIT, hf="gradient_accumulation_steps", lightning="accumulate_grad_batches", accelerate="gradient_accumulation_steps", other="grad_accum_steps grad_accum accumulation_steps accum_iter accumulate"),
    _itself(f"{_DDP}, by NCCL on GPUs and Gloo on CPUs", lightning="strategy", accelerate="distributed_type", hf="ddp_backend", other="backend dist_backend ddp distributed_backend"),
    _itself('workers take the GPUs of their node if it has some; nodes.nproc_per_node = "cpu" for none', lightning="accelerator auto_select_gpus", hf="use_cpu no_cuda", accelerate="cpu device_placement", other="device use_cuda cuda use_gpu"),
    _itself("each worker gets it from the launch", torchrun="RANK LOCAL_RANK WORLD_SIZE GROUP_RANK", accelerate="machine_rank", hf="local_rank"),
    _itself(_RESUMES, hf="resume_from_checkpoint", lightning="resume_from_checkpoint", titan="load_step", other="resume auto_resume resume_from continue_training"),
    _itself("snapshots are taken at any rate: snapshots.every says when", lightning="enable_checkpointing", other="save_checkpoints"),
    _itself("training goes on while a snapshot is written", titan="async_mode", other="async_save"),
    _itself("a snapshot holds every random state", accelerate="rng_types"),
    _itself("each run has a folder of its own", hf="overwrite_output_dir logging_dir", titan="save_tb_folder", other="log_folder run_dir work_dir"),
    _itself("`elasticflow run --log-format` says how progress is shown", hf="disable_tqdm", lightning="enable_progress_bar", other="progress_bar tqdm"),
    _itself("it is pinned where that is faster", torch="pin_memory", hf="dataloader_pin_memory"),
    _itself("what is to be done is the command: `elasticflow run`; [evaluation] evaluates meanwhile", hf="do_train do_eval", other="mode"),
    _itself("the metrics of all steps and workers are kept", hf="log_on_each_node save_on_each_node logging_first_step"),
    _itself("it is what the command runs", accelerate="main_training_function compute_environment same_network"),
    # What is not offered, and what to do instead.
    _none(f"{_DDP}; no model is sharded", hf="fsdp fsdp_config deepspeed", accelerate="fsdp_config deepspeed_config megatron_lm_config parallelism_config", titan="parallelism data_parallel_shard_degree tensor_parallel_degree pipeline_parallel_degree context_parallel_degree expert_parallel_degree", other="zero_stage tp pp dp tensor_parallel_size pipeline_parallel_size tensor_parallel pipeline_parallel"),
    _none("training is on NVIDIA GPUs or on CPUs", lightning="tpu_cores ipus", hf="use_mps_device tpu_num_cores", accelerate="tpu_name tpu_zone downcast_bf16"),
    _none("call torch.utils.checkpoint in your model", hf="gradient_checkpointing activation_checkpointing", titan="activation_checkpoint"),
    _none("give it to your loss function", hf="label_smoothing_factor", other="label_smoothing"),
    _none("SIGTERM or `elasticflow cancel` ends a run with a snapshot, and it can go on", lightning="max_time"),
    _none("train.epochs or train.steps is how long it trains", lightning="min_epochs min_steps", other="early_stopping patience early_stop"),
    _none(_SHORT, lightning="fast_dev_run limit_train_batches limit_val_batches overfit_batches num_sanity_val_steps", other="dry_run smoke_test"),
    _none("a step of your own does it: model.step", lightning="callbacks", other="hooks"),
    _none("profile a step of your own: model.step", lightning="profiler", titan="profiler enable_profiling"),
    _none("snapshots become files of weights by `elasticflow snapshots export`", hf="push_to_hub hub_model_id hub_token hub_strategy save_safetensors save_only_model", titan="last_save_in_hf export_dtype"),
    _none("try some out with a [matrix]", lightning="auto_lr_find auto_scale_batch_size", hf="auto_find_batch_size"),
    _none("set it in your own module: it is a switch of torch", lightning="benchmark", hf="tf32", other="cudnn_benchmark matmul_precision allow_tf32"),
    _none(_NO_SINKS, hf="report_to", accelerate="log_with", lightning="logger", titan="enable_tensorboard enable_wandb", other="wandb tensorboard use_wandb wandb_project wandb_run_name wandb_log mlflow loggers"),
    _none("your own dataset does it", hf="remove_unused_columns group_by_length label_names neftune_noise_alpha", titan="seq_len"),
    _none(_VARIABLES, torchrun="CUDA_VISIBLE_DEVICES NCCL_DEBUG", accelerate="gpu_ids", other="env environment env_vars envs environment_variables"),
    _none("snapshots.every and keep say which stay", titan="last_save_model_only enable_first_step_checkpoint"),
    _none("loader processes are started anew with each launch", torch="persistent_workers prefetch_factor worker_init_fn", hf="dataloader_persistent_workers dataloader_prefetch_factor"),
    _none("elasticflow takes a job file to where it is run, and starts no machines", other="slurm_partition partition image instance_type"),
)  # fmt: skip

LOCAL = MappingProxyType(
    {
        "entry": [
            "name",
            "type",
            "target",
            "class_path",
            "class",
            "cls",
            "func",
            "function",
            "callable",
            "factory",
            "import_path",
            "kind",
        ],
        "args": [
            "init_args",
            "kwargs",
            "params",
            "parameters",
            "arguments",
            "config",
            "hparams",
            "hyperparameters",
            "settings",
        ],
    }
)
"""Names of what makes an object, and of its arguments, in the table of the object itself."""

SAME_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "bfloat16": ("bf16",), "bf16-mixed": ("bf16",), "bf16-true": ("bf16",), "torch.bfloat16": ("bf16",),
        "float16": ("fp16",), "16-mixed": ("fp16",), "16": ("fp16",), "half": ("fp16",), "torch.float16": ("fp16",),
        "float32": ("fp32",), "32": ("fp32",), "32-true": ("fp32",), "no": ("fp32",), "full": ("fp32",), "float": ("fp32",), "tf32": ("fp32",),
        "true": ("drop",), "drop_last": ("drop",), "keep": ("short",), "pad": ("spill",), "wrap": ("spill",),
        "warn": ("warning",), "critical": ("error",), "fatal": ("error",), "verbose": ("debug",), "trace": ("debug",),
        "raise": ("stop",), "abort": ("stop",), "fail": ("stop",), "ignore": ("skip",), "continue": ("skip",),
        "batch": ("step",), "iteration": ("step",), "cuda": ("gpu",), "gpus": ("gpu",), "all": ("auto",), "-1": ("auto",), "none": ("never",), "off": ("never",),
        "deterministic": ("exact",), "bitwise": ("exact",), "strict": ("exact",), "etcd": ("etcd-v2",), "forkserver": ("spawn",), "md5": ("crc32",), "sha-256": ("sha256",),
    }
)  # fmt: skip
"""Words of other tools for values, in small letters, and what a key here may call them; which of them it takes, its type says."""


def plain(name: str) -> str:
    """Return a name as it is looked up: case, hyphens and the dashes of an option do not count."""
    return name.lower().replace("-", "_").strip("_ ")


def meanings() -> dict[str, Meaning]:
    """Return what each name means, by its plain form; of a name with two meanings, the one that stands first."""
    found = {
        option: Meaning("", note=note) for option, note in DECIDED_ELSEWHERE.items() if option != "module"
    }
    for meaning, names in ROWS:
        for words in names.values():
            for name in words.split():
                found.setdefault(plain(name), meaning)
    return found


def meaning_of(name: str) -> Meaning | None:
    """Return what a name of another tool is in a job file; None for one that no tool has."""
    by_name, wanted = meanings(), plain(name)
    return by_name.get(wanted) or by_name.get(wanted.removeprefix("pet_"))  # torchrun's options as variables


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
    "log_line_prefix_template": "a line that tee shows begins with the workers' role and the local rank, as torchrun's own do",
    "print_completion": "elasticflow completion does that for elasticflow's own commands",
    "virtual_local_rank": "each worker chooses the GPU of its local rank by itself",
    "role": "all workers of a job have one role",
    "module": "what is started is the generated train.py",
    "no_python": "what is started is the generated train.py",
    "run_path": "what is started is the generated train.py",
    "training_script": "what is started is the generated train.py",
    "training_script_args": "what is started is the generated train.py; the job file holds its values",
}
