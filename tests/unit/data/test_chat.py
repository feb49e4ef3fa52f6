"""Conversations: tokens and answers as transformers has them, templates that ask for too much, and the marks in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.data.blend import Blend, BlendedDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MARK_TYPE, DatasetError, IndexedDataset, get_loss_mask_prefix, open_loss_mask
from megatron.data.indexed_writer import write_dataset
from megatron.data.samples import DEFAULT_MARKS, DOCUMENT_END, IN_LOSS, DocumentRules, read_microbatch
from megatron_lab.data_tools.preprocess.chat import ChatEncoder, ChatTemplate, describe_named_template
from megatron_lab.data_tools.preprocess.chat_records import Chat
from megatron_lab.data_tools.preprocess.errors import BadRecordError
from megatron_lab.tokenizers.huggingface import HuggingFaceTokenizer
from tests.support.chats import CHATS, MARKED, PLAIN, SPECIAL, write_tokenizer


def encoder(folder: Path, template: str, date: str | None = None) -> ChatEncoder:
    """An encoder whose template lies in the tokenizer's settings."""
    path = write_tokenizer(folder, template)
    return ChatEncoder(ChatTemplate.load(path, None, date), path)


def encode(chat_encoder: ChatEncoder, messages: list[dict[str, Any]]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """The ids and marks of a conversation that is one document."""
    (document,) = chat_encoder.encode(Chat(messages)).documents
    return document


def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = encoder(tmp_path, MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for chat in CHATS:
        ids, marks = encode(ours, chat)
        wanted = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert ids.tolist() == wanted["input_ids"]
        empty = sum(message == {"role": "assistant", "content": ""} for message in chat)
        # Transformers lets an empty answer be learned.
        assert sum(wanted["assistant_masks"]) == marks.sum() + empty and (marks <= wanted["assistant_masks"]).all()
        answers = [message["content"] + "<|im_end|>" for message in chat if message["role"] == "assistant" and message["content"]]
        assert theirs.decode(ids[marks == IN_LOSS]) == "".join(answers)


def test_without_marks_answers_are_what_each_adds(tmp_path: Path) -> None:
    """That is more by the line's end behind each answer."""
    marked, plain = encoder(tmp_path / "marked", MARKED), encoder(tmp_path / "plain", PLAIN)
    for chat in CHATS:
        (ids, marks), (same, more) = encode(marked, chat), encode(plain, chat)
        assert ids.tolist() == same.tolist()
        added = np.flatnonzero(marks != more)
        assert (more[added] == IN_LOSS).all() and len(added) == sum(
            message["role"] == "assistant" and message["content"] != "" for message in chat
        )
        assert (marks[added - 1] == IN_LOSS).all()


@pytest.mark.parametrize(
    "template, message, expected",
    [
        ("{{ raise_exception('roles must alternate') }}", "x", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "x", "unsafe"),
        ("{{ messages.append(1) }}", "x", "refuses"),
        ("{{ strftime_now('%d') }}", "x", "--chat-date"),
        (MARKED, "a <|im_end|> b", "message 0 contains '<|im_end|>'"),
        (MARKED, "a \0\ue000(\ue000\0 b", "message 0 contains"),
        ("{{ missing.attribute }}", "x", "missing"),
        ("{{ '{} {}'.format(1) }}", "x", "refuses"),
        (MARKED, "\ud800", "message 0 contains half of a surrogate pair"),
    ],
)
def test_what_a_template_refuses_is_a_bad_record(tmp_path: Path, template: str, message: str, expected: str) -> None:
    with pytest.raises(BadRecordError, match=expected):
        encode(encoder(tmp_path, template), [{"role": "assistant", "content": message}])


def test_names_of_arguments_are_text_too(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"<|im_end|>": 1}}}]}
    with pytest.raises(BadRecordError, match=r"message 0 contains '<\|im_end\|>'"):
        encode(encoder(tmp_path, MARKED), [call])


def test_an_answer_that_is_not_written_has_no_known_place(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    with pytest.raises(BadRecordError, match="generation"):
        encode(encoder(tmp_path, template), [{"role": "assistant", "content": "one"}])


def test_a_date_is_the_one_that_is_given(tmp_path: Path) -> None:
    ids, _ = encode(encoder(tmp_path, "{{ strftime_now('%d.%m.%Y') }}", "2026-01-31"), [{"role": "user", "content": ""}])
    assert len(ids) == len("31.01.2026")


@pytest.mark.parametrize("place", ["list", "jinja", "file", "nowhere", "broken"])
def test_where_a_template_stands(tmp_path: Path, place: str) -> None:
    path, template, file = write_tokenizer(tmp_path, ""), "{{ bos_token }}", None
    if place == "list":
        write_tokenizer(tmp_path, [{"name": "tools", "template": "no"}, {"name": "default", "template": template}])  # type: ignore[arg-type]
    elif place in ("jinja", "broken"):
        (tmp_path / "chat_template.jinja").write_text(template if place == "jinja" else "{% if %}")
    elif place == "file":
        file = tmp_path / "mine.jinja"
        file.write_text(template)
    else:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    if place in ("nowhere", "broken"):
        with pytest.raises(ValueError, match="--chat-template FILE" if place == "nowhere" else "is not valid"):
            ChatEncoder(ChatTemplate.load(path, None, None), path)
        return
    found = ChatTemplate.load(path, None if file is None else str(file), None)
    assert (found.text, dict(found.special_tokens)["bos_token"]) == (template, "<|endoftext|>")


def test_chatml_is_known_by_name(tmp_path: Path) -> None:
    """For a tokenizer without a template; answers end with the token that ends them, and the notes say what is lacking."""
    path = write_tokenizer(tmp_path / "t", PLAIN)
    template = ChatTemplate.load(path, "chatml", None)
    chat = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    ids, marks = encode(ChatEncoder(template, path), chat)
    tokenizer = HuggingFaceTokenizer(path)
    assert tokenizer.decode([*ids[marks == 0]]) + tokenizer.decode([*ids[marks > 0]]) == "user\n1 + 1\nassistant\n2\n"
    (note,) = describe_named_template(template, path)
    assert "chat_template.jinja" in note and not [*describe_named_template(ChatTemplate.load(path, None, None), path)]
    document = json.loads(path.read_text())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in SPECIAL]
    path.write_text(json.dumps(document))
    assert "encoded as ordinary text" in next(describe_named_template(template, path))
    with pytest.raises(BadRecordError, match="special token"):
        encode(ChatEncoder(template, path), [{"role": "user", "content": "<|im_end|>"}])


# ---- marks in use


def masked(folder: Path, documents: list[list[int]], marks: list[list[int]] | None, name: str = "d") -> GPTDataset:
    """Samples of three tokens of these documents, in their order."""
    prefix = str(folder / name)
    for path, content, dtype in ((prefix, documents, np.uint16), (get_loss_mask_prefix(prefix), marks, MARK_TYPE)):
        if content is not None:
            with write_dataset(path, dtype) as writer:
                for each in content:
                    writer.add_documents(each)
    dataset = IndexedDataset(prefix)
    settings: dict[str, Any] = {"split": 0, "seed": 1, "seq_length": 3, "vocab_size": 50}
    opened = None if marks is None else open_loss_mask(dataset)
    return GPTDataset(dataset, range(len(documents)), **settings, marks=opened)


def test_marks_go_with_their_tokens(tmp_path: Path) -> None:
    """In every sample, in any order, and in a blend with data that has none."""
    documents = [[10, 11, 12, 13, 14], [20, 21], [30, 31, 32, 33, 34, 35]]
    marks = [[token % 2 + (DOCUMENT_END if at + 1 == len(each) else 0) for at, token in enumerate(each)] for each in documents]
    chats, texts = masked(tmp_path, documents, marks), masked(tmp_path, [[40, 41, 42, 43, 0, 44]], None, "plain")
    blend = BlendedDataset([chats, texts], Blend([1.0, 1.0]))
    for source in (chats, blend):
        tokens, found = source.get_samples(0, 12), source.get_marks(0, 12)
        assert found is not None and found.shape == tokens.shape
        of_chats, ends = (tokens >= 10) & (tokens < 40), np.isin(tokens, [14, 21, 35])
        assert np.array_equal(found[of_chats], (tokens % 2 + DOCUMENT_END * ends)[of_chats])
        assert (found[~of_chats] == DEFAULT_MARKS).all()
    assert texts.get_marks(0, 3) is None and BlendedDataset([texts], Blend([1.0])).get_marks(0, 3) is None


class Marked:
    """One sample whose end-of-document token, 0, ends turns too."""

    seq_length = 6

    def get_samples(self, first: int, count: int) -> NDArray[np.int64]:
        return np.array([[5, 0, 6, 0, 7, 0, 8]])

    def get_marks(self, first: int, count: int) -> NDArray[np.uint8] | None:
        return np.array([[0, 0, IN_LOSS, IN_LOSS | DOCUMENT_END, DEFAULT_MARKS, DEFAULT_MARKS, DEFAULT_MARKS]], MARK_TYPE)


def test_a_turn_does_not_end_a_conversation() -> None:
    """Only what is learned counts; documents end where the marks say, beyond them at the token."""
    batch = read_microbatch(Marked(), 0, 1, DocumentRules(0, True, True))  # type: ignore[arg-type]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 1, 1]]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.positions is not None and batch.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    batch = read_microbatch(Marked(), 0, 1, DocumentRules(0, eod_mask_loss=True))  # type: ignore[arg-type]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 1, 0]]


@pytest.mark.parametrize(
    "marks, expected",
    [([[1, 1], [0, 2, 1]], "the lengths of the documents differ"), ([[1, 1, 1, 2]], "the lengths of the documents differ")],
)
def test_marks_of_another_dataset_are_refused(tmp_path: Path, marks: list[list[int]], expected: str) -> None:
    with pytest.raises(DatasetError, match=expected):
        masked(tmp_path, [[1, 2, 3], [4, 5]], marks)


def test_marks_of_another_type_are_refused(tmp_path: Path) -> None:
    masked(tmp_path, [[1, 2, 3, 4]], None)
    with write_dataset(get_loss_mask_prefix(str(tmp_path / "d")), np.uint16) as writer:
        writer.add_documents([1, 1, 1, 1])
    with pytest.raises(DatasetError, match="uint8"):
        open_loss_mask(IndexedDataset(str(tmp_path / "d")))
