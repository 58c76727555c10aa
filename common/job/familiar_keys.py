"""Names of settings in other trainers, and the job-file keys that correspond to them."""

from __future__ import annotations

from collections.abc import Mapping

# Key -> the names, of options and of keys, that TRL, verl, prime-rl, OpenRLHF and unsloth use.
_NAMES: Mapping[str, str] = {
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.group_size": "num_generations n_samples_per_prompt rollouts_per_example rollout_n",
    "algorithm.groups_per_step": "batch batch_size train_batch_size per_device_train_batch_size",
    "algorithm.kl_coefficient": "beta kl_coef kl_coeff kl_loss_coef init_kl_coef",
    "budget.steps": "steps max_steps num_steps total_steps total_training_steps iterations",
    "dataset.config": "dataset_config subset dataset.name",
    "dataset.epochs": "epochs num_train_epochs num_epochs total_epochs max_epochs",
    "dataset.held_out": "eval_dataset val_files val_data eval_data test_data",
    "dataset.train_split": "split dataset_split dataset_train_split",
    "dataset.held_out_split": "eval_split dataset_test_split",
    "dataset.mix": "mixture data_mix dataset_mixture dataset_mixer prompt_data_probs probabilities",
    "dataset.prompt": "prompt_key input_key dataset_text_field",
    "dataset.shuffle": "shuffle_dataset data_shuffle shuffle_prompts",
    "dataset.system": "system_prompt system_message",
    "dataset.train": "dataset train_dataset dataset_name train_file train_files data prompt_data",
    "evaluation.every": "eval_steps test_freq eval_interval eval_every",
    "evaluation.patience": "early_stopping_patience early_stopping",
    "evaluation.samples": "val_n n_samples_per_eval_prompt eval_samples",
    "lora.alpha": "lora_alpha",
    "lora.rank": "lora_rank lora_r use_peft lora qlora",
    "lora.targets": "target_modules lora_target_modules",
    "mesh.device": "device cuda cpu",
    "mesh.workers": "workers num_workers gpus num_gpus n_gpus num_processes nproc_per_node",
    "model.path": "model model_name model_id model_name_or_path base_model pretrain",
    "name": "run_name experiment_name project_name",
    "optimizer.adamw_lr": "lr learning_rate actor_learning_rate",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "out": "output output_dir save_dir default_local_dir",
    "reward.use": "reward reward_funcs reward_function reward_fn custom_reward_function",
    "rollout.max_tokens": "max_new_tokens max_completion_length max_response_length max_length "
    "max_seq_length max_model_len seq_len",
    "tracking.tensorboard": "tensorboard logging_dir",
    "tracking.wandb": "wandb wandb_project report_to use_wandb logger tracking.use",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.checkpoint_every": "save_steps save_freq save_interval",
    "training.dtype": "dtype bf16 fp16 torch_dtype",
}
# (Key, value of other trainers) -> what to write.
FAMILIAR_VALUES: Mapping[tuple[str, str], str] = {
    **dict.fromkeys(
        [("algorithm.name", name) for name in ("dpo", "orpo", "kto", "simpo", "ipo")],
        "No algorithm learns preference pairs: use sft on the chosen answers, or grpo with a "
        "reward",
    ),
    ("algorithm.name", "lora"): "Set lora.rank, with any algorithm",
    ("mesh.device", "gpu"): "Write cuda",
    ("mesh.device", "auto"): "Write cuda or cpu",
    ("optimizer.schedule", "constant_with_warmup"): "Write constant, and set "
    "optimizer.warmup_steps",
}
FAMILIAR_KEYS: Mapping[str, str] = {
    name: key for key, names in _NAMES.items() for name in names.split()
}
