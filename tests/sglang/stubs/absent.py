"""Packages that SGLang imports and a CPU does without: every name can be imported from them, and none does anything.

Kernels may be defined against such a package. Calling one, or whatever else is not there, raises NotImplementedError.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class AbsentNames(type):
    """Classes with any constant: `InterpolationMode.BICUBIC`."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class AbsentModule(types.ModuleType):
    """A module with any name: one with a capital is a class that takes any arguments, another one a module again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        value = _absent_class(name, path) if name[0].isupper() else importlib.import_module(path)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: object, **named: object) -> None:
        raise NotImplementedError(f"{self.__name__} is not there: this is a stand-in for imports")


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below a package."""

    def __init__(self, package: str) -> None:
        self._below = f"{package}."

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if self._covers(fullname) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""

    def _covers(self, name: str) -> bool:
        return name.startswith(self._below)


def _absent_class(name: str, path: str) -> type:
    def take_anything(self: object, *arguments: object, **named: object) -> None:
        """Base classes, exceptions and settings are made while modules are imported."""

    return AbsentNames(name, (Exception,), {"__module__": path.rpartition(".")[0], "__init__": take_anything})


def stand_in(package: str) -> None:
    """Make a module of one file a package of absent modules; the names that it has itself stay."""
    module = sys.modules[package]
    module.__class__ = AbsentModule
    module.__path__ = []
    sys.meta_path.insert(0, AbsentModules(package))
