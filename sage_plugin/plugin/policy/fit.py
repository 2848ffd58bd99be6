"""Whether a policy is one for a model: its class, and a layer for each rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sage_plugin.errors import ConfigError
from sage_plugin.plugin.policy.rules import Policy, Rule


def fitting_rules(
    policy: Policy, models: Iterable[str], names: Mapping[str, Sequence[str]], *, others: str
) -> list[tuple[int, Rule]]:
    """Return the rules of some op families, numbered from 1, each of which names a layer.

    Args:
        policy: the policy.
        models: names of the classes that are there.
        names: layers by op family.
        others: whom rules of other op families are for, in a sentence's words.

    Raises:
        ConfigError: the policy is of another model, has no such rule, or one that names no layer.
    """
    kinds = sorted(set(models))
    if policy.model and policy.model not in kinds:
        raise ConfigError(f"the policy is for {policy.model}, and this is {', '.join(kinds)}")
    found = [(n, rule) for n, rule in enumerate(policy.rules, start=1) if rule.op in names]
    if not found:
        raise ConfigError(
            f"the policy has no rule of {', '.join(names)}; give it to {others}, or add one"
        )
    for number, rule in found:
        if not any(map(rule.names, names[rule.op])):
            raise ConfigError(
                f"rule {number} of the policy names no layer of this model with "
                f"{', '.join(rule.layers)}; its layers are such as "
                f"{next(iter(names[rule.op]), 'none')}"
            )
    return found
