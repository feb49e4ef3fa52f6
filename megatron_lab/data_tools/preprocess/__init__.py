"""Preprocessing: conversion of texts to indexed datasets, in parallel over shards of the input."""
