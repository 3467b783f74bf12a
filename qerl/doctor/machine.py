"""Checks of the machine and of the model's files: nothing is loaded."""

from __future__ import annotations

from importlib import metadata

from qerl.console import human_bytes
from qerl.doctor.context import Context, NotChecked
from qerl.doctor.frame import Finding, check

TIGHT = 0.8  # of the memory there is: activations are not in the plan


@check("versions", "recipe")
def versions(context: Context) -> Finding:
    """Every package qerl needs is installed in the range it was written for."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires("qerl") or []]
    except metadata.PackageNotFoundError:
        raise NotChecked("qerl is not installed as a package, so its ranges are unknown") from None
    found: dict[str, str | None] = {}
    wrong = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found[requirement.name] = version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version or 'missing'} ({requirement.specifier})")
    if wrong:
        return Finding(
            "fail", f"out of range: {', '.join(wrong)}", "pip install --upgrade qerl", found
        )
    main = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "peft"))
    return Finding("ok", f"{main} and {len(found) - 3} more are in range", data=found)


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@check("device", "recipe")
def device(context: Context) -> Finding:
    """The device exists and is new enough; the compute type is one it multiplies in hardware."""
    import torch

    from qerl.environment import cpu_model, usable_cores

    where, dtype = context.device
    name = str(dtype).removeprefix("torch.")
    data = {"device": str(where), "dtype": name}
    if where.type == "cuda":
        gpu = torch.cuda.get_device_properties(where)
        data |= {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"}
        return Finding("ok", f"{gpu.name} (sm_{gpu.major}{gpu.minor}) in {name}", data=data)
    data |= {"name": cpu_model(), "cores": usable_cores()}
    text = f"{data['name']}, {data['cores']} cores, in {name}"
    if dtype != torch.float32:
        slow = f"{text}: on a CPU 16-bit products are slower than float32 ones"
        return Finding("warn", slow, "dtype: float32 (or auto)", data)
    return Finding("ok", text, data=data)


@check("model", "recipe")
def model(context: Context) -> Finding:
    """The model is where the recipe says, with a configuration and a tokenizer."""
    config = context.config
    _ = context.tokenizer
    kind = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    length = context.context_length
    data = {"source": str(context.source), "architecture": kind, "context": length}
    return Finding("ok", f"{kind}, context {length or 'unknown'}, in {context.source}", data=data)


@check("memory", "recipe")
def memory(context: Context) -> Finding:
    """The plan of what stays resident fits the memory that is free now."""
    plan, free = context.plan, context.available_bytes
    share = plan.total / free
    data = {"available": free, **plan.as_dict()}
    text = f"{human_bytes(plan.total)} resident of {human_bytes(free)} free ({share:.0%})"
    largest = max(plan.lines, key=lambda line: line.bytes)
    if share > 1:
        fix = f"the largest part is {largest.name} ({human_bytes(largest.bytes)}): {largest.note}"
        return Finding("fail", f"does not fit: {text}", fix, data)
    if share > TIGHT:
        fix = "lower rollout.max_rows or train.tokens_per_micro_batch, or free some memory"
        return Finding("warn", f"tight: {text}, activations not counted", fix, data)
    return Finding("ok", f"{text}, activations not counted", data=data)
