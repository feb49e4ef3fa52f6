"""Setup script for tools that require one. All settings are in pyproject.toml."""

from setuptools import setup

setup()
