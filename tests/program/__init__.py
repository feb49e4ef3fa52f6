"""Whole programs: training runs, tools, launch scripts and the commands of the documents."""
