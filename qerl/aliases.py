"""Names that TRL, Unsloth and verl use, and what they are called here.

A name is looked up whole first (`data.train_batch_size`), then by its last part, so that
`training_args.num_generations` is understood too.
"""

from __future__ import annotations

# TRL GRPOConfig / Hugging Face TrainingArguments / PEFT LoraConfig; Unsloth's FastLanguageModel
# takes most of them under the same names.
_KEYS: dict[str, str] = {
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_new_tokens": "rollout.max_completion_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "lr_scheduler_type": "train.lr_schedule",
    "warmup_ratio": "train.warmup_steps",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "clip_grad": "train.max_grad_norm",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "loss_type": "algorithm.loss",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_cap": "algorithm.correction_max",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "max_lora_rank": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "lora_adapter_path": "lora.init",
    "model_name": "model",
    "model_name_or_path": "model",
    "pretrained_model_name_or_path": "model",
    "torch_dtype": "dtype",
    "load_in_4bit": "format",
    "load_in_8bit": "format",
    "quantization": "format",
    "dataset_name": "task.dataset",
    "dataset_train_split": "task.split",
    "train_dataset": "task.dataset",
    "system_prompt": "task.system",
    "reward_funcs": "task.reward",
    "reward_model_path": "task.reward",
    "output_dir": "output.dir",
    "run_name": "output.name",
    "num_completions_to_print": "output.log_completions",
    "log_completions": "output.log_completions",
    "save_steps": "save.every",
    "save_total_limit": "save.keep",
    "load_best_model_at_end": "save.best",
    "eval_steps": "eval.every",
    "eval_on_start": "eval.at_start",
    "random_state": "seed",
    "use_gradient_checkpointing": "train.gradient_checkpointing",
    "enable_gradient_checkpointing": "train.gradient_checkpointing",
    "use_vllm": "rollout.engine",
    "fast_inference": "rollout.engine",
    "max_num_seqs": "rollout.max_rows",
    # NVlabs/QeRL's scripts
    "sigma_schedule": "noise.schedule",
    "noise_type": "noise.schedule",
    "num_stages": "noise.stages",
    # verl (hydra names)
    "data.train_files": "task.dataset",
    "data.val_files": "task.eval_dataset",
    "data.prompt_key": "task.prompt_column",
    "data.max_response_length": "rollout.max_completion_tokens",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.model.target_modules": "lora.targets",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.loss",
    "norm_adv_by_std_in_grpo": "algorithm.scale_rewards",
    "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "filter_groups": "algorithm.skip_zero_variance",
    "custom_reward_function.path": "task.reward",
    "trainer.total_training_steps": "train.steps",
    "trainer.experiment_name": "output.name",
    "trainer.default_local_dir": "output.dir",
    "trainer.save_freq": "save.every",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "eval.at_start",
    "trainer.max_actor_ckpt_to_keep": "save.keep",
}

# The ones that are counted or meant differently, in full sentences.
_NOTES: dict[str, str] = {
    "warmup_ratio": "in qerl it is `train.warmup_steps`, a number of steps",
    "load_in_4bit": "in qerl it is `format`: nvfp4",
    "load_in_8bit": "in qerl it is `format`: nvfp4 or bf16",
    "reward_model_path": "in qerl rewards are functions: `task.reward`, as ./file.py:function",
    "clip_ratio": "in qerl it is `algorithm.clip_low` and `algorithm.clip_high`",
    "per_device_train_batch_size": "in qerl a step has `rollout.prompts_per_step` prompts with "
    "`rollout.group_size` completions each; memory is bounded by `train.tokens_per_micro_batch`",
    "per_device_eval_batch_size": "in qerl it is `rollout.max_rows`",
    "gradient_accumulation_steps": "qerl accumulates by itself: set `rollout.prompts_per_step` for "
    "the batch and `train.tokens_per_micro_batch` for memory",
    "steps_per_generation": "qerl samples once a step: set `rollout.prompts_per_step`",
    "generation_batch_size": "in qerl it is `rollout.prompts_per_step` × `rollout.group_size`",
    "train_batch_size": "in qerl it is `rollout.prompts_per_step`",
    "ppo_mini_batch_size": "qerl makes one update per rollout: set `rollout.prompts_per_step`",
    "ppo_micro_batch_size_per_gpu": "in qerl it is `train.tokens_per_micro_batch`, in tokens",
    "num_train_epochs": "qerl counts steps: set `train.steps`",
    "total_epochs": "qerl counts steps: set `train.steps`",
    "num_iterations": "qerl makes one update per rollout; remove this key",
    "ppo_epochs": "qerl makes one update per rollout; remove this key",
    "beta": "qerl has no KL penalty; remove this key (kl is still measured)",
    "kl_coef": "qerl has no KL penalty; remove this key (kl is still measured)",
    "kl_loss_coef": "qerl has no KL penalty; remove this key (kl is still measured)",
    "use_kl_loss": "qerl has no KL penalty; remove this key (kl is still measured)",
    "entropy_coeff": "qerl has no entropy bonus; remove this key (entropy is still measured)",
    "adv_estimator": "qerl always compares within a group; see `algorithm.baseline`",
    "max_seq_length": "qerl reads the context from the model; set `rollout.max_completion_tokens` "
    "and `task.max_prompt_tokens`",
    "gpu_memory_utilization": "qerl shares one copy of the weights; remove this key",
    "vllm_gpu_memory_utilization": "qerl shares one copy of the weights; remove this key",
    "bf16": "in qerl it is `dtype`: bfloat16",
    "fp16": "in qerl it is `dtype`: float16",
    "logging_steps": "qerl logs every step to metrics.jsonl; remove this key",
    "report_to": "qerl writes metrics.jsonl; remove this key",
    "optim": "qerl trains with AdamW; remove this key",
    "top_p": "qerl samples from the whole distribution; remove this key",
    "top_k": "qerl samples from the whole distribution; remove this key",
}


def lookup(key: str) -> str | None:
    """What to say about another project's name for a setting; None if it is not a known one."""
    for name in (key, key.rsplit(".", 1)[-1]):
        if name in _NOTES:
            return _NOTES[name]
        if name in _KEYS:
            return f"in qerl it is `{_KEYS[name]}`"
    return None


def targets() -> dict[str, str]:
    """Every alias that has one equivalent, with the recipe key it stands for."""
    return dict(_KEYS)
