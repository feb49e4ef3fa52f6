"""Conversion of launch scripts and configurations of other frameworks to launch commands of this project."""
