"""Plots and tables of pipeline schedules."""
