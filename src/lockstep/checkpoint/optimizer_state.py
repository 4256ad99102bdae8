"""State of an optimizer besides that by parameter and its parameter groups.

Entries of `optimizer.state` whose key is no parameter, such as a counter, and the further entries
that an overridden `state_dict` returns. Attributes of other optimizers: training/attributes.py.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.checkpoint.json_tree import differing_paths, encode, pack
from lockstep.errors import CheckpointError, UsageError
from lockstep.units import join_names

TORCH_KEYS = ("state", "param_groups")  # of a state_dict of torch


def unsupported_state(what: str, where: str) -> CheckpointError:
    hint = "use an optimizer whose state is tensors and numbers by parameter (AdamW, SGD, ...)"
    return CheckpointError(f"{what}, which a checkpoint cannot hold", where, hint)


def overrides(optimizer: Optimizer, name: str) -> bool:
    """Return whether the method is not torch's own."""
    return getattr(getattr(optimizer, name), "__func__", None) is not getattr(Optimizer, name)


def refuse_inner_optimizers(optimizer: Optimizer) -> None:
    """UsageError when the optimizer holds another one, and its state_dict is torch's own."""
    inner = {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}
    if not inner or overrides(optimizer, "state_dict"):
        return
    kind, (name, value) = type(optimizer).__name__, next(iter(inner.items()))
    raise UsageError(
        f"{kind} keeps another optimizer, "
        f"{type(value).__name__}, in its attribute {name}, which its state_dict does not return",
        "after a resume, and in a worker that joins, "
        f"{type(value).__name__} would start without its state",
        f"let state_dict and load_state_dict of {kind} include it, "
        "or train with the inner optimizer",
    )


def own_state(optimizer: Optimizer, known: Collection[int]) -> dict[str, dict[Any, Any]]:
    """Return the state that belongs to no parameter; {} if there is none. CheckpointError for
    values that a checkpoint cannot hold.

    known  ids of the parameters of the model
    """
    kind = type(optimizer).__name__
    found: dict[str, dict[Any, Any]] = {}
    for key, value in optimizer.state.items():
        if id(key) in known or value is None or (isinstance(value, Mapping) and not value):
            continue
        if isinstance(key, Tensor):
            raise unsupported_state(
                f"{kind} keeps state that belongs to no parameter",
                f"key {str(key)[:40]!r} of its state",
            )
        found.setdefault("state", {})[key] = value
    if overrides(optimizer, "state_dict"):
        returned = optimizer.state_dict()
        own = {key: value for key, value in returned.items() if key not in TORCH_KEYS}
        if own:
            found["state_dict"] = sorted_by_key(own)
    for source, values in found.items():
        where = "state that belongs to no parameter"
        if source == "state_dict":
            where = f"{kind}.state_dict()"
        for key, value in values.items():
            try:
                encode({key: value}, f"{kind}.{source}", {})
            except (UsageError, CheckpointError) as error:
                raise unsupported_state(
                    f"{kind} keeps {key!r} as a {type(value).__name__}", f"{where}; {error.what}"
                ) from None
    return found


def sorted_by_key(value: Any) -> Any:
    """Return nested dicts in the order of their keys: load_state_dict of torch changes that
    order."""
    if type(value) is list:
        return [sorted_by_key(item) for item in value]
    if type(value) is not dict:
        return value
    return {key: sorted_by_key(value[key]) for key in sorted(value, key=repr)}


def load_own_state(
    optimizer: Optimizer, saved: Mapping[str, dict[Any, Any]], known: Collection[int]
) -> None:
    """Restore the result of `own_state`; the state by parameter stays as it is."""
    optimizer.state.update(saved.get("state", {}))
    if not (overrides(optimizer, "state_dict") or overrides(optimizer, "load_state_dict")):
        return
    # torch's load_state_dict casts the state to the dtypes of the parameters, and moves "params",
    # which the digest would show.
    exact = dict(optimizer.state)
    orders = [list(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({**optimizer.state_dict(), **saved.get("state_dict", {})})
    optimizer.state.clear()
    optimizer.state.update(exact)
    for group, order in zip(optimizer.param_groups, orders, strict=True):
        values = {key: group[key] for key in [*order, *group] if key in group}
        group.clear()
        group.update(values)
    name = f"{type(optimizer).__name__}.state_dict"
    before, after = (
        pack(name, state.get("state_dict", {})) for state in (saved, own_state(optimizer, known))
    )
    if wrong := differing_paths(name, before, after):
        raise CheckpointError(
            f"{type(optimizer).__name__} differs from the saved state after load_state_dict: "
            f"{join_names(wrong)}",
            "the optimizer's own state_dict and load_state_dict",
            "let load_state_dict restore everything that state_dict returns",
        )
