"""Conversion of other frameworks' launch scripts and configurations to launch commands of this project."""
