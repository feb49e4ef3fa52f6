"""What the tests share: references, runs, layouts, corpora, random command lines."""
