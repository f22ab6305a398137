"""The options in ``param_groups``: checked when they are made, and again when somebody has edited them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from freehold.errors import RuleError
from freehold.rules import Rule
from freehold.runtime.routing import Route

__all__ = ["LiveOptions"]


class LiveOptions:
    """Checks the param groups against the rules, and against every param that is in them.

    Args:
        kinds: The rule of each group as it was planned.
        group_of: Index of each route's group.
        routes: The params.
        rules: The rule of each kind.
    """

    def __init__(
        self, kinds: Sequence[str], group_of: Sequence[int], routes: Sequence[Route], rules: Mapping[str, Rule]
    ) -> None:
        self._kinds = list(kinds)
        self._rules = rules
        self._members: list[list[Route]] = [[] for _ in kinds]
        for route, group in zip(routes, group_of, strict=True):
            self._members[group].append(route)
        self._checked: list[dict[str, Any]] = [{} for _ in kinds]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse options that no rule can work with; all groups and params that do not fit are named at once.

        Args:
            groups: As they are now. Params are looked at only if an option that is no number changed since the last
                call: schedulers change numbers at every step.

        Raises:
            RuleError: Naming the groups and params, and the options.
        """
        found = [group.get("rule") for group in groups]
        if found != self._kinds:
            raise RuleError(f"param_groups were planned with rules {self._kinds} in this order, and now have {found}")
        problems: list[str] = []
        for index, group in enumerate(groups):
            try:
                self._rules[self._kinds[index]].validate(group)
            except RuleError as error:
                problems.append(f"param group {index}: {error}")
        if not problems:
            problems = [text for index, group in enumerate(groups) for text in self._misfits(index, group)]
        if problems:
            raise RuleError("; ".join(problems))

    def _misfits(self, index: int, group: Mapping[str, Any]) -> list[str]:
        shaping = {
            name: value for name, value in group.items() if isinstance(value, (str, tuple)) or type(value) is int
        }
        if shaping == self._checked[index]:
            return []
        problems: list[str] = []
        for route in self._members[index]:
            try:
                self._rules[route.kind].check_param(route.named.name, _rule_shape(route), group)
            except RuleError as error:
                problems.append(str(error))
        if not problems:
            self._checked[index] = shaping
        return problems


def _rule_shape(route: Route) -> tuple[int, ...]:
    """``(M, N)`` of the matrices of a param, or its own shape under an elementwise rule."""
    shape = route.planned_shape
    if route.kind != "matrix":
        return shape
    return shape[1:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
