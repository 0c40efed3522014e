"""Flags of other trainers, and what they are called here."""

from collections.abc import Collection

_SIZE = "--scale or --init_from=DIR, a Hugging Face directory or name"
_DTYPE = "--set model.compute_dtype=bfloat16"
_LOGS = "--set run.trackers=wandb"

SENTENCES = {
    "epochs": "training is counted in --steps or --minutes, not in epochs.",
    "config": "--flagfile=FILE reads flags, one a line; --set path=value sets any setting.",
    "device": "jax takes the accelerator that it finds; write JAX_PLATFORMS=cpu (or cuda, tpu) "
    "before the command for another.",
    "sparsity": "--density=0.125 is the fraction of blocks that is stored: 87.5% sparsity.",
    "verbose": "information is shown unless --quiet is given.",
}
"""Kind -> the hint."""

KINDS = {
    "epochs": "epoch num_epochs num_train_epochs max_epochs",
    "config": "cfg config_file config_name config_path yaml",
    "device": "accelerator platform cpu gpu cuda tpu no_cuda use_cpu backend",
    "sparsity": "sparsity_ratio sparse_ratio",
    "verbose": "v verbosity debug log_level",
}
"""Kind -> its other names."""

HERE = {
    "--learning_rate": "lr learning_rate max_lr peak_lr base_lr",
    "--batch": "bs batch_size global_batch_size train_batch_size per_device_train_batch_size "
    "micro_batch_size minibatch_size",
    "--steps": "iters max_steps num_steps train_steps max_iters num_iters training_steps "
    "total_steps max_train_steps train_iters",
    "--corpus": "data dataset datasets data_path data_dir train_data train_file dataset_name "
    "dataset_path text input train_files",
    "--out": "output output_dir out_dir outdir save save_dir workdir run_dir logdir log_dir "
    "checkpoint_dir ckpt_dir name run_name exp_name experiment",
    "--resume": "resume_from resume_from_checkpoint continue load_checkpoint resume_path restore",
    "--mesh": "gpus num_gpus devices num_devices n_gpus nproc nproc_per_node tp dp pp "
    "tensor_parallel_size tensor_model_parallel_size data_parallel strategy fsdp sharding",
    "--evolution": "method sparse_method pruning prune rigl",
    "--pattern": "mask layout sparsity_pattern",
    "--block": "block_size sparse_block blocksize",
    "--run": "model model_name model_path model_name_or_path pretrained ckpt checkpoint_path "
    "path load from_pretrained",
    "--max_new_tokens": "max_tokens max_length length num_tokens new_tokens n_tokens",
    "--samples": "n num_samples num_return_sequences",
    "--num_fewshot": "fewshot shots few_shot",
    "--to": "out output output_dir dir",
    _SIZE: "model model_name model_path model_name_or_path pretrained from_pretrained size preset "
    "model_size arch model_type",
    _DTYPE: "bf16 fp16 half amp dtype mixed_precision precision torch_dtype compute_dtype",
    _LOGS: "wandb tensorboard tb report_to logger logging tracker mlflow wandb_project",
    "--set training.sequence=TOKENS": "seq_len seq_length sequence_length context context_length "
    "context_size max_seq_len max_seq_length n_ctx max_length ctx_len",
    "--set model.num_layers=N": "layers n_layer n_layers depth num_hidden_layers",
    "--set model.d_model=N": "hidden_size hidden_dim n_embd dim width embed_dim d_hidden dmodel",
    "--set model.num_heads=N": "heads n_head n_heads num_attention_heads",
    "--set training.warmup=FRACTION": "warmup_steps warmup_iters warmup_ratio num_warmup_steps "
    "lr_warmup_steps",
    "--set training.micro_batches=N": "grad_accum gradient_accumulation accumulation_steps "
    "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches",
    "--set run.eval_every=STEPS": "eval_interval eval_steps eval_freq evaluation_steps val_every "
    "val_interval",
    "--set run.checkpoint_every=STEPS": "save_steps save_interval save_every checkpoint_interval "
    "ckpt_interval save_freq",
    "--set training.optimizer=NAME": "optim opt",
    "--set model.remat=full": "gradient_checkpointing activation_checkpointing checkpointing",
}
"""What is legal here -> names of others for it."""


def hint(name: str, flags: Collection[str], sets: bool) -> str:
    """Returns what a flag of others is called here as the end of a sentence, or "".

    Args:
      name: the flag without dashes in front.
      flags: names of the legal flags.
      sets: whether --set is legal.
    """
    word = name.lower().replace("-", "_")
    if word in flags:
        return f"did you mean --{word}?"
    for here, others in HERE.items():
        legal = sets if here.startswith("--set") else here[2:].split(" ")[0] in flags
        if word in others.split() and legal:
            return f"did you mean {here}?"
    for kind, others in KINDS.items():
        if sets and word in (kind, *others.split()):
            return SENTENCES[kind]
    return ""
