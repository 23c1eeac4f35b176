"""The packages; `recipes/` is installed inside hybridflow, for `hybridflow new`. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["hybridflow*"]), "hybridflow.recipes"],
    package_dir={"hybridflow.recipes": "recipes"},
)
