"""Settings of any size made so small that they run here in seconds, and still show what the layout does.

What a setting chooses (schedule, strategy, norms, ...) stays; numbers become small in the same proportions.
"""

from __future__ import annotations
