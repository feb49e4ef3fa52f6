"""Runs settings twice in float64: at their layout on local processes, and as the plain reference."""

from __future__ import annotations
