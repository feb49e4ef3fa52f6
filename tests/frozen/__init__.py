"""Records of what a refactoring must not change, and their comparison."""
