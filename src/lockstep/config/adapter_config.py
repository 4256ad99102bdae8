"""adapter_config.json of PEFT, as peft 0.21 writes it: from the values of `lora.*`, and back.

Every key is read, known not to change what an adapter computes, or refused unless it is off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError
from lockstep.files import read_json

if TYPE_CHECKING:
    from lockstep.config.schema import LoraOptions

ADAPTER_CONFIG = "adapter_config.json"
LORA_TARGETS = {  # matrices of a layer -> their names in Hugging Face models
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj", "gate": "gate_proj",
    "up": "up_proj", "down": "down_proj",
}  # fmt: skip
PLAIN: dict[str, Any] = json.loads("""{
"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
"base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying":
false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode":
true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern":
null, "layers_to_transform": null, "loftq_config": {}, "lora_bias": false, "lora_ga_config": null,
"megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null,
"monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16,
"rank_pattern": {}, "revision": null, "target_parameters": null, "task_type": "CAUSAL_LM",
"trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false,
"use_rslora": false, "velora_config": null
}""")  # of a LoRA without further features
READ = {
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
}
# Names, the state of peft, and options without effect while their feature is off.
IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}


def adapter_config(lora: LoraOptions, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of a run's adapters over the model in folder `base`."""
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    targets = [LORA_TARGETS.get(name, name) for name in lora.targets]
    values = {
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
    }
    return dict(sorted((PLAIN | values).items()))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the values of `lora.*` that adapter_config.json in `folder` defines.

    CheckpointError: it is damaged, or has a value that is not implemented.
    """
    where = str(folder / ADAPTER_CONFIG)
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        if missing := [key for key in ("peft_type", *READ) if key not in config]:
            raise ValueError(f"it has no {missing[0]}")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{ADAPTER_CONFIG} cannot be read: {error}",
            where,
            "give a folder that save_pretrained of peft "
            "or lockstep checkpoint export --adapter has written",
        ) from None
    for key in ("peft_type", *config):
        value = config[key]
        is_plain = value == PLAIN.get(key) or (key == "init_lora_weights" and value == "gaussian")
        if key not in READ and key not in IGNORED and value and not is_plain:
            raise CheckpointError(
                f"{key} is {json.dumps(value)[:80]}",
                where,
                "only plain LoRA is supported; "
                "merge the adapter with peft (merge_and_unload) and start from the merged model",
            )
    ours, modules = {name: key for key, name in LORA_TARGETS.items()}, config["target_modules"]
    if (
        not isinstance(modules, list)
        or not modules
        or not all(isinstance(name, str) and name in ours for name in modules)
    ):
        raise CheckpointError(
            f"target_modules is {json.dumps(modules)[:80]}",
            where,
            f"supported: a list of {', '.join(ours)}",
        )
    targets = [key for key, name in LORA_TARGETS.items() if name in modules]
    return {key: config[name] for name, key in READ.items()} | {"lora.targets": targets}
