"""Preprocessing: conversion of texts to indexed datasets. The input is divided into shards, which several workers convert at the
same time."""
