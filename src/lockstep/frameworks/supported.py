"""Arguments and methods of a Trainer that the loop of a Session supports. Others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from lockstep import UsageError

# Arguments that the loop honors, or that do not change its result, and values of others beside the
# default. All else is refused: other optimizers update in the backward pass, or have other weights
# between two steps; other schedules follow a metric.
HONORED = """
    accelerator_config activation_checkpointing adam_beta1 adam_beta2 adam_epsilon
    average_tokens_across_devices bf16 dataloader_in_order dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout
    disable_tqdm do_eval do_predict do_train eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_steps eval_strategy eval_use_gather_object
    gradient_accumulation_steps gradient_checkpointing greater_is_better hub_model_id
    hub_private_repo hub_token include_for_metrics label_names label_smoothing_factor learning_rate
    length_column_name log_level log_level_replica log_on_each_node logging_first_step
    logging_steps logging_strategy lr_scheduler_kwargs max_grad_norm max_steps
    metric_for_best_model num_train_epochs optim_args output_dir per_device_eval_batch_size
    per_device_train_batch_size prediction_loss_only project remove_unused_columns
    restore_callback_states_from_checkpoint run_name save_steps save_total_limit seed
    torch_compile use_cpu warmup_ratio warmup_steps weight_decay
    assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc
    dataset_text_field eos_token eval_packing loss_type max_length model_init_kwargs packing
    packing_strategy pad_to_multiple_of pad_token padding_free router_aux_loss_coef shuffle_dataset
    truncation_mode trust_remote_code
    report_to=[] save_strategy=no torch_compile_backend=inductor
    optim=adamw_torch optim=adafactor optim=adagrad optim=rmsprop optim=sgd
    lr_scheduler_type=cosine lr_scheduler_type=cosine_with_restarts lr_scheduler_type=polynomial
    lr_scheduler_type=constant lr_scheduler_type=constant_with_warmup lr_scheduler_type=inverse_sqrt
    lr_scheduler_type=cosine_with_min_lr lr_scheduler_type=cosine_warmup_with_min_lr
    lr_scheduler_type=warmup_stable_decay
"""
# Methods of a Trainer that the loop, `__init__` or the user calls; others must not be overridden.
CALLED = """
    __init__ _build_accelerator_args _determine_best_metric _get_collator_with_removed_columns
    _get_learning_rate _get_num_items_in_batch _move_model_to_device _remove_unused_columns _save
    _set_signature_columns_if_needed _validate_args add_callback autocast_smart_context_manager
    call_model_init compute_loss compute_loss_context_manager create_accelerator_and_postprocess
    create_model_card create_optimizer create_optimizer_and_scheduler create_scheduler end
    get_cp_size get_decay_parameter_names get_learning_rates get_num_trainable_parameters
    get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size get_test_dataloader get_tp_size
    hyperparameter_search init_hf_repo log log_metrics metrics_format pop_callback predict
    push_to_hub remove_callback save_metrics save_model save_state
"""
# Their modules, whose versions of the other methods do no more than the loop does.
FRAMEWORK_MODULES = "transformers.trainer transformers.trainer_seq2seq trl.trainer.sft_trainer"
# Events of which the loop does not notify.
SILENT_EVENTS = "on_substep_end on_save on_prediction_step on_push_begin"


def refuse_unsupported(trainer: Trainer, loop: type[Trainer], checkpoint: object) -> None:
    """UsageError for what the loop would leave out without an error.

    loop        the class whose `train` is the loop
    checkpoint  that `train` was to resume from
    """
    refused = [
        *[f"resume_from_checkpoint={checkpoint}"] * bool(checkpoint),
        *unsupported_arguments(trainer.args),
        *ignored_methods(trainer, loop),
        *unsupported_parts(trainer),
    ]
    if refused:
        raise UsageError(
            f"SessionLoop does not support {', '.join(refused)}",
            type(trainer).__name__,
            "leave it out, or train without SessionLoop: a failure then restarts all workers",
        )


def unsupported_arguments(args: TrainingArguments) -> Iterator[str]:
    # A subclass may add arguments.
    kind = next(k for k in type(args).mro() if module_of(k).startswith(("transformers.", "trl.")))
    for field in fields(kind):
        value = getattr(args, field.name)
        given = f"{field.name}={getattr(value, 'value', value)}"
        is_given = (value or None) != (field.default or None)
        if is_given and {field.name, given}.isdisjoint(HONORED.split()):
            yield given


def ignored_methods(trainer: Trainer, loop: type[Trainer]) -> Iterator[str]:
    """Yield the overridden methods that a Trainer calls and the loop does not."""
    for name in vars(Trainer):
        method = getattr(super(loop, trainer) if name in vars(loop) else trainer, name)
        is_called = name in CALLED.split() or not callable(method)
        if not is_called and module_of(method) not in FRAMEWORK_MODULES.split():
            yield f"{type(trainer).__name__}.{name}"
    for callback in trainer.callback_handler.callbacks:
        for event in SILENT_EVENTS.split():
            if not module_of(getattr(callback, event)).startswith("transformers."):
                yield f"{type(callback).__name__}.{event}"


def unsupported_parts(trainer: Trainer) -> Iterator[str]:
    for name in ("compute_metrics", "preprocess_logits_for_metrics", "model_init"):
        if getattr(trainer, name) is not None:
            yield name
    optimizer = trainer.optimizer or (trainer.optimizer_cls_and_kwargs or [None])[0]
    if hasattr(optimizer, "eval"):
        yield "an optimizer with train and eval"
    if isinstance(trainer.train_dataset, IterableDataset):
        yield "an IterableDataset"
    if hasattr(trainer.train_dataset, "set_epoch"):
        yield "a data set with set_epoch"
    if trainer.args.use_cpu and torch.cuda.is_available():
        yield "use_cpu=True on a machine with GPUs, unless CUDA_VISIBLE_DEVICES is empty"
    if trainer.accelerator.num_processes > 1:
        yield "workers of another launcher than lockstep run and lockstep launch"


def module_of(method: object) -> str:
    return getattr(method, "__module__", None) or ""
