"""Whether documents of a dataset end as the run expects: without an end-of-document token the rules about documents do nothing."""

from __future__ import annotations

import numpy as np

from megatron.data.batches import DocumentRules
from megatron.data.indexed_dataset import IndexedDataset

_LOOKED_AT = 64
_TOKENS_LOOKED_AT = 2**22
"""Of documents that do not end with the token: it may stand within (several texts in one document)."""


def missing_ends(dataset: IndexedDataset, documents: range, rules: DocumentRules) -> str | None:
    """A warning, if rules about documents are on and some 64 documents, spread over the range, hold no end of document."""
    flags = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(rules, name)]
    if not flags or not documents or _has_end(dataset, documents, rules.eod):
        return None
    named = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
    return (
        f"{dataset.prefix}: none of {min(len(documents), _LOOKED_AT)} documents that were looked at has the end-of-document id "
        f"{rules.eod:,}, so {named} will do nothing for it. Make it again with tools/preprocess_data.py --append-eod, or give the "
        "tokenizer it was made with."
    )


def _has_end(dataset: IndexedDataset, documents: range, eod: int) -> bool:
    chosen = np.linspace(documents.start, documents.stop - 1, min(len(documents), _LOOKED_AT)).astype(np.int64).tolist()
    left = _TOKENS_LOOKED_AT
    for last_alone in (True, False):
        for document in chosen:
            first, stop = dataset.document_index[document : document + 2].tolist()
            for sequence in reversed(range(first, stop)):
                length = int(dataset.lengths[sequence])
                count = min(length, 1 if last_alone else left)
                if count and (dataset.read(sequence, length - count, count) == eod).any():
                    return True
                left -= 0 if last_alone else count
                if count and last_alone:
                    break
    return False
