"""Shows the classes of `hybridflow.settings` in the reference as the dataclasses that they are."""

from __future__ import annotations

from typing import Any

import griffe

SETTINGS = "hybridflow.settings.settings"


class SettingsAsDataclasses(griffe.Extension):
    """Reads `@settings` as `@dataclass(kw_only=True)`, so that a class has its options as a signature."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        if any(decorator.callable_path == SETTINGS for decorator in cls.decorators):
            name = griffe.ExprName("dataclasses.dataclass")
            call = griffe.ExprCall(name, [griffe.ExprKeyword("kw_only", "True")])
            cls.decorators.append(griffe.Decorator(call, lineno=cls.lineno, endlineno=cls.lineno))
